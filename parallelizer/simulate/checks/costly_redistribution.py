"""`costly-redistribution`: a tensor on several axes is moved in an order that sends more than another."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.runtime.redistribution import sent
from parallelizer.simulate.checks.moved_alike import moved_alike, moves_text, path_text
from parallelizer.simulate.checks.traced_step import Traced


def costly_redistribution(traced: Traced) -> Iterator[Diagnostic]:
    """Moves of which torch's planner knows a cheaper path. Others are `multi-hop-redistribution`."""
    for moves, span in moved_alike(traced):
        cheaper = moves[0].cheaper
        if cheaper is not None:
            less = size(sum(sent(m.cheaper or ()) for m in moves))
            yield Diagnostic(
                "costly-redistribution",
                f"{moves_text(moves)}, where {path_text(cheaper)} would send {less}",
                span,
                "set parallel.redistribute=min-cost, which takes that path in the run",
                "warning",
            )
