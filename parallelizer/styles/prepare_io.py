"""`prepare-io`: converts the placements of a module's inputs and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import AXIS, INPUT, INPUT_GRAD, LOCAL, OUTPUT
from parallelizer.styles.registry import implements

if TYPE_CHECKING:
    from parallelizer.styles.target import Sharding, Target

declare(
    StyleDeclaration(
        "prepare-io",
        "io",
        "tp",
        "convert the placement of inputs and outputs",
        {
            "input": INPUT,
            "output": OUTPUT,
            "local": LOCAL,
            "axis": AXIS,
            "local_input": OptionKind("bool", "pass plain tensors to the module: torch's use_local_input"),
            "grad": INPUT_GRAD,
        },
        defaults={"local": "true", "local_input": "false", "grad": "replicate"},
    )
)


@implements("prepare-io")
def prepare_io(target: Target) -> Sharding:
    """Both; `local` is for the outputs, `local_input` for the inputs, as in torch's PrepareModuleInputOutput."""
    from parallelizer.styles.prepare import prepare

    return prepare(target, inputs=True, outputs=True)
