"""A rehearsal as text: one rank's step on a real device beside the dry run's prediction."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TextIO

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.units import size
from parallelizer.report.rows.rehearsal import Compared

UNSEEN = (
    "Not seen: sums over ranks, the order of collectives between ranks, links, and what overlaps with them. "
    "Values are those of no training."
)


def write(compared: Sequence[Compared], stream: TextIO) -> None:
    """Print every rank that was rehearsed, and what a rehearsal cannot show."""
    width = show_diagnostics.width_of_terminal()
    for one in compared:
        for name, text in _lines(one):
            line = f"  {name:<13}{text}" if name else text
            stream.write(
                textwrap.fill(line, width, subsequent_indent=" " * 15, break_on_hyphens=False) + "\n"
            )
    stream.write(textwrap.fill(UNSEEN, width) + "\n")
    stream.flush()


def _lines(one: Compared) -> list[tuple[str, str]]:
    found, peak = one.rehearsal, one.rehearsal.peak
    lines = [("", f"rank {found.rank:,} of {found.ranks:,}, rehearsed on {found.device}")]
    apart = peak.requested - one.planned.peak
    more = f"{'+' if apart >= 0 else '-'}{size(abs(apart))}"
    lines.append(
        (
            "memory",
            f"{size(peak.requested)} at the peak, {size(one.planned.peak)} predicted ({more})",
        )
    )
    if peak.allocated is not None and peak.reserved is not None:
        highest = max(peak.phases, key=lambda name: peak.phases[name]) if peak.phases else "the step"
        lines.append(
            (
                "",
                f"{' ' * 15}{size(peak.allocated)} allocated, {size(peak.reserved)} reserved; highest in {highest}",
            )
        )
    lines.append(("time", one.time))
    if one.whole_job is not None:
        lines.append(("whole job", one.whole_job))
    shares = one.shares
    if shares:
        lines.append(("kernels", f"{found.kernels.count:,}: " + ", ".join(f"{k} {v:.0%}" for k, v in shares)))
    if found.graphs[0]:
        anew = f", and {found.graphs[1]} in later steps" if found.graphs[1] else ", none in later steps"
        lines.append(("graphs", f"{found.graphs[0]} compiled in the first step{anew}"))
    reads = ", ".join(f"{place} ({times})" for place, times in found.host_reads.items())
    lines.append(("host reads", f"{sum(found.host_reads.values())} a step{': ' + reads if reads else ''}"))
    lines.append(("collectives", one.collectives))
    return lines
