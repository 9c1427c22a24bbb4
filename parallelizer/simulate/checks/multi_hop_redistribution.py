"""`multi-hop-redistribution`: a tensor on several axes moves over one after the other, in an order that sends least."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.moved_alike import moved_alike, moves_text
from parallelizer.simulate.checks.traced_step import Traced


def multi_hop_redistribution(traced: Traced) -> Iterator[Diagnostic]:
    """Moves of which torch's planner knows no cheaper path. Others are `costly-redistribution`."""
    for moves, span in moved_alike(traced):
        if moves[0].cheaper is None:
            help_text = "torch's planner knows no order that sends less"
            yield Diagnostic("multi-hop-redistribution", moves_text(moves), span, help_text, "note")
