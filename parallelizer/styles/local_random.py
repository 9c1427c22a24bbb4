"""`local-random`: separate random numbers on each rank, for dropout of tensors that are split over an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import AXIS
from parallelizer.styles.registry import applies, exports, implements
from parallelizer.styles.statements import Statement, calls
from parallelizer.styles.target import Sharding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from parallelizer.styles.application import Application, Exporting, Live
    from parallelizer.styles.target import Target

declare(
    StyleDeclaration(
        "local-random",
        "random",
        "tp",
        "draw different random numbers on each rank, for dropout on split tensors",
        {
            "layout": OptionKind(
                "placement", "the placement of what is dropped: with `replicate`, ranks draw the same numbers"
            ),
            "axis": AXIS,
        },
    )
)


@implements("local-random")
def local_random(target: Target) -> Sharding:
    """Dropout of what is split over the axis: each rank drops of its own part, independently of the others. Where the layout is
    `replicate`, nothing is split, and the style does nothing.
    """
    layout = target.options.get("layout")
    whole = layout is not None and layout.kind == "replicate"
    return Sharding(None, () if whole else (target.axis,))


@applies("local-random")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """Let the module's forward draw on each rank of the axis independently."""
    from parallelizer.styles.random_numbers import draw_apart

    draw_apart(module, live.submesh(application.axes), application.axes[0])


@exports("local-random")
def export(application: Application, exporting: Exporting) -> Iterator[Statement]:
    """The same call."""
    from parallelizer.styles.random_numbers import draw_apart

    yield calls(draw_apart, exporting.mesh, f'"{application.axes[0]}"')
