"""`varying-loss`: ranks that hold slices of one model come to different losses."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.followed_step import Followed


def varying_loss(followed: Followed) -> Iterator[Diagnostic]:
    """A loss that varies over an axis which cuts the model."""
    for axis, since in followed.flow.loss.items():
        yield Diagnostic(
            "varying-loss",
            f"the loss differs between the ranks of {axis}, because the ranks have different logits",
            followed.span(since, axis, ("output",)),
            "return them as DTensors with `local: false`, so that the loss knows their placement, or gather them: "
            "`output: replicate`",
        )
