"""`local-positions`: every rank counts positions from 0, and they meet its part of the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped


def local_positions(followed: Followed) -> Iterator[Diagnostic]:
    """Numbers that a forward makes from the length of the sequence that it is given. Rows that it takes from a table of
    the model's are `missing-buffers`.
    """
    made = [p for p in followed.flow.positions if p.counted.tensor is None]
    for same in grouped(made, lambda p: p.counted.module):
        first = same[0]
        yield Diagnostic(
            "local-positions",
            f"{followed.folded([first.counted.module])} counts positions from 0 on every rank of cp, but each rank has "
            f"other rows of the sequence in {followed.folded([first.module])}",
            followed.context_span(),
            "let forward take the positions, and add an entry for them to buffers.batch: `position_ids: positions`",
        )
