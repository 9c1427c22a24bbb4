"""`unequal-random`: each rank draws random numbers of its own for a tensor of which every rank has a copy."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.varying import ApartDraw


def unequal_random(followed: Followed) -> Iterator[Diagnostic]:
    """Dropout under `local-random` on what is whole on every rank of the axis."""
    for same in grouped(followed.flow.apart, lambda d: (d.axis, followed.rule_of(d.module, d.axis))):
        first, where = same[0], followed.folded(d.module for d in same)
        made_by = followed.folded(d.maker for d in same)
        span = followed.span(first.module, first.axis, ())
        maker = followed.span(first.maker, first.axis, ("output", "layout"))
        label = f"the output of {made_by} is whole on every rank of {first.axis}"
        yield Diagnostic(
            "unequal-random",
            f"{where} draws different random numbers on each rank of {first.axis}, although every rank has the same tensor "
            f"there, the output of {made_by}: the copies become different",
            span,
            _advice(followed, first, made_by),
            related=(Related(maker, label),) if maker is not None and maker != span else (),
        )


def _advice(followed: Followed, draw: ApartDraw, made_by: str) -> str:
    """To split the tensor, if a module with a rule made it and the plan names a split, or to draw alike."""
    own = followed.application(draw.maker, draw.axis)
    split = next((name for name, p in followed.program.plan.layouts.items() if p.kind == "shard"), None)
    alike = "remove `local-random`, since all ranks must drop the same elements of it"
    if own is None or own.style != "rowwise" or "output" in own.spans or split is None:
        return alike
    return f"if this tensor is to be split, write `output: {split}` into the rule of {made_by}; otherwise {alike}"
