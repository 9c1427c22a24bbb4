"""`prepare-input`: converts the placements of a module's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import AXIS, INPUT, INPUT_GRAD, LOCAL
from parallelizer.styles.registry import implements

if TYPE_CHECKING:
    from parallelizer.styles.target import Sharding, Target

declare(
    StyleDeclaration(
        "prepare-input",
        "io",
        "tp",
        "convert the placement of inputs",
        {
            "input": INPUT,
            "local": LOCAL,
            "grad": INPUT_GRAD,
            "axis": AXIS,
            "cast": OptionKind(
                "choice",
                "float8: the inputs are gathered in float8, for linears in float8 of the recipe tensorwise",
                ("float8",),
            ),
        },
        defaults={"local": "false", "grad": "replicate"},
    )
)


@implements("prepare-input")
def prepare_input(target: Target) -> Sharding:
    """Inputs arrive so and are wanted so; plain tensors are handed on only with `local: true`."""
    from parallelizer.styles.prepare import prepare

    return prepare(target, inputs=True, outputs=False)
