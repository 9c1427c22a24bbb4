"""`small-fsdp-units`: all-gathers so small that their number costs more than their bytes."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.checks.traced_step import SMALL, Traced, modules_text
from parallelizer.simulate.record.ledger import Collective

MANY_RANKS, MANY_CALLS = 8, 8
"""Small all-gathers are worth a word from this many ranks and this many calls a step on."""


def small_fsdp_units(traced: Traced) -> Iterator[Diagnostic]:
    """Many all-gathers of few bytes over many ranks."""
    units = {a.module: a for a in traced.program.of_slot("fsdp") if a.module}
    calls: dict[str, list[Collective]] = {}
    for entry in traced.fsdp_gathers():
        if entry.module in units and entry.ranks >= MANY_RANKS:
            calls.setdefault(entry.module, []).append(entry)
    small = [units[m] for m, entries in calls.items() if max(e.payload_bytes for e in entries) < SMALL]
    for found in grouped(small, lambda a: a.rule.span):
        entries = [e for a in found for e in calls[a.module]]
        if len(entries) >= MANY_CALLS:
            average = sum(e.payload_bytes for e in entries) // len(entries)
            yield Diagnostic(
                "small-fsdp-units",
                f"{modules_text(found)} {'is' if len(found) == 1 else 'are'} gathered in {len(entries):,} all-gathers a step of "
                f"{size(average)} on average over {entries[0].ranks:,} ranks: below {size(SMALL)} most of the time is latency",
                found[0].rule.span,
                "put several modules into one unit: write the rule for a module around them, or set `min_params` "
                "above their size",
                "warning",
            )
