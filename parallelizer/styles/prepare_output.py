"""`prepare-output`: converts the placements of a module's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import AXIS, LOCAL, OUTPUT
from parallelizer.styles.registry import implements

if TYPE_CHECKING:
    from parallelizer.styles.target import Sharding, Target

declare(
    StyleDeclaration(
        "prepare-output",
        "io",
        "tp",
        "lay out outputs anew",
        {
            "output": OUTPUT,
            "local": LOCAL,
            "grad": OptionKind(
                "choice",
                "of a replicated output handed on as a plain tensor: partial: sum its gradients over the axis; replicate: "
                "do not",
                ("partial", "replicate"),
            ),
            "grad_last": OptionKind(
                "size",
                "how many of the last features `grad` is of, a number or an attribute of the module or one around it; all "
                "unless said",
            ),
            "axis": AXIS,
        },
        defaults={"local": "true", "grad": "replicate"},
    )
)


@implements("prepare-output")
def prepare_output(target: Target) -> Sharding:
    """Outputs come out so and leave so, as plain tensors unless `local: false`."""
    from parallelizer.styles.prepare import prepare

    return prepare(target, inputs=False, outputs=True)
