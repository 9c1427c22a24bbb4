"""`equal-random`: every rank draws the same random numbers for another part of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.simulate.checks.followed_step import OPTIONS, Followed
from parallelizer.simulate.checks.grouped import grouped


def equal_random(followed: Followed) -> Iterator[Diagnostic]:
    """Dropout, or another draw, on what is split over a tensor axis, whose ranks are seeded alike."""
    drawn = [d for d in followed.flow.draws if d.axis in TENSOR_AXES]
    for same in grouped(drawn, lambda d: (d.axis, _any_layer(d.module))):
        first, where = same[0], followed.folded(d.module for d in same)
        began = followed.since(first.since, first.axis)
        span = followed.span(first.module, first.axis, OPTIONS) or next((r.span for r in began), None)
        yield Diagnostic(
            "equal-random",
            f"{where} draws the same random numbers on every rank of {first.axis}, although each rank has another part of the "
            "tensor: dropout repeats its pattern in every part",
            span,
            _advice(followed, first.module, where),
            "warning",
            tuple(r for r in began if r.span != span),
        )


def _advice(followed: Followed, module: str, where: str) -> str:
    """A rule to add, or the style to add to the rule with that key: a plan cannot have two rules with one key."""
    own = followed.application(module, None)
    if own is not None and own.rule.key == where:
        return f"let each rank draw its own: add `local-random` to the styles of the rule `{where}`"
    return f"let each rank draw its own: `{where}: local-random`"


def _any_layer(module: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))
