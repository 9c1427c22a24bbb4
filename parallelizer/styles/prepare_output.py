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
        "convert the placement of outputs",
        {
            "output": OUTPUT,
            "local": LOCAL,
            "grad": OptionKind(
                "choice",
                "for a replicated output that is returned as a plain tensor: partial sums its gradients over the axis; "
                "replicate does not",
                ("partial", "replicate"),
            ),
            "grad_last": OptionKind(
                "size",
                "the number of last features that `grad` applies to: a number, or an attribute of the module or one around it; "
                "all by default",
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
