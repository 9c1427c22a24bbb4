"""`missing-buffers`: every rank takes the first rows of a table of the model's for its part of the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped


def missing_buffers(followed: Followed) -> Iterator[Diagnostic]:
    """Tables of which a forward takes as many rows as its part of the sequence has, and which are not split with it.
    Positions that a forward counts itself are `local-positions`.
    """
    tensors = [p for p in followed.flow.positions if p.counted.tensor is not None]
    for same in grouped(tensors, lambda p: p.module.rpartition(".")[2]):
        first = same[0]
        names = ", ".join(dict.fromkeys(str(p.counted.tensor) for p in same))
        listed = ", ".join(f"{p.counted.tensor}: {p.counted.dim}" for p in same)
        yield Diagnostic(
            "missing-buffers",
            f"every rank of cp takes the first rows of {names}, but each rank has other rows of the sequence in "
            f"{followed.folded([first.module])}",
            followed.context_span(),
            f"add `{listed}` to buffers.model of {followed.program.plan.file}",
        )
