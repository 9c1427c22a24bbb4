"""`half-sequence-parallel`: some modules work on the sharded sequence, others on the whole one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.diagnostics.units import size
from parallelizer.runtime.redistribution import wire_bytes
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.checks.redundant_redistribution import undone
from parallelizer.simulate.checks.traced_step import Traced, modules_text, sent_text, written
from parallelizer.styles.conversions import Conversion, conversions


def half_sequence_parallel(traced: Traced) -> Iterator[Diagnostic]:
    """Sums over an axis leave some modules sharded along the sequence and others whole."""
    leaving = [
        c
        for a in traced.program.of_slot("params", "io")
        for c in conversions(a)
        if c.leaves and c.before.kind == "partial"
    ]
    returned = traced.calls.returned_by if traced.calls else ()
    # What is told as a redundant redistribution is not told again.
    told = {first.application.module for first, _ in undone(traced)}
    for axis in dict.fromkeys(c.axis for c in leaving):
        sharded = [c for c in leaving if c.axis == axis and c.after.kind == "shard"]
        whole = [
            c
            for c in leaving
            if c.axis == axis and c.kind == "reduce" and c.application.module not in (*returned, *told)
        ]
        if not sharded:
            continue
        for found in grouped(whole, lambda c: c.application.rule.span):
            calls = [
                e for c in found for e in traced.entries("forward", axis, c.application.module, "all_reduce")
            ]
            saved = sum(e.wire_bytes - wire_bytes("reduce_scatter", e.payload_bytes, e.ranks) for e in calls)
            yield Diagnostic(
                "half-sequence-parallel",
                f"{_many(found, 'leave')} the sequence whole on every rank of {axis}, while {_many(sharded, 'shard')} it: "
                f"{sent_text(calls)}, {size(saved)} more than sharded",
                written(found[0]),
                f"write `output: {sharded[0].after}` there, or `output: replicate` everywhere",
                "warning",
                (Related(written(sharded[0]), "this one leaves it sharded"),),
            )


def _many(found: Sequence[Conversion], verb: str) -> str:
    return f"{modules_text(c.application for c in found)} {verb}{'s' if len(found) == 1 else ''}"
