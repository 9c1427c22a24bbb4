"""`replicated-sum`: what every rank of an axis holds alike is summed over the axis."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.varying import EqualSum


def replicated_sum(followed: Followed) -> Iterator[Diagnostic]:
    """A sum over an axis, in forward or of gradients, of values that do not vary over it."""

    def alike(s: EqualSum) -> Hashable:
        return followed.rule_of(s.module, s.axis), s.axis, s.phase

    for same in grouped((*followed.flow.sums, *_gradients(followed)), alike):
        first, where = same[0], followed.folded(s.module for s in same)
        size = followed.program.mesh.sizes[first.axis]
        what = "the gradients in" if first.phase == "backward" else "the values from"
        yield Diagnostic(
            "replicated-sum",
            f"{what} {where} are summed over {first.axis}, but every rank of {first.axis} holds the same values: the sum is "
            f"{size} times too large",
            followed.span(first.module, first.axis, ("grad", "output", "input")),
            "write `grad: replicate` where every rank computes the same gradient; `partial` is for terms of a sum",
        )


def _gradients(followed: Followed) -> Iterator[EqualSum]:
    """Gradients that are taken for terms of a sum, and are the same on every rank."""
    axes = [axis for axis in sorted(TENSOR_AXES) if followed.program.mesh.sizes[axis] > 1]
    for gradient in followed.flow.gradients:
        for axis in axes:
            if axis in gradient.partial and axis not in gradient.varies:
                yield EqualSum(axis, gradient.parameter.rpartition(".")[0], "backward")
