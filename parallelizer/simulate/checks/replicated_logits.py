"""`replicated-logits`: every tensor rank holds all logits, where a vocabulary-parallel loss would do with a slice."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.simulate.checks.traced_step import Traced, sent_text, written
from parallelizer.styles.conversions import Conversion, conversions


def replicated_logits(traced: Traced) -> Iterator[Diagnostic]:
    """The model's output is gathered over its last dimension."""
    for application in traced.program.of_slot("params", "io"):
        if traced.calls is None or application.module not in traced.calls.returned_by:
            continue
        for conversion in conversions(application):
            if not conversion.leaves or conversion.kind != "gather" or not _last(conversion):
                continue
            gathers = traced.entries("forward", conversion.axis, application.module, "all_gather")
            calls = (
                gathers[
                    len(gathers) // traced.workload.accumulate - 1 :: len(gathers)
                    // traced.workload.accumulate
                ]
                if gathers
                else []
            )
            if not calls:
                continue
            held = calls[0].payload_bytes
            yield Diagnostic(
                "replicated-logits",
                f"every rank of {conversion.axis}={calls[0].ranks} holds all logits: {sent_text(calls)}, and a rank holds "
                f"{size(held)}, where a vocabulary-parallel loss needs {size(held // calls[0].ranks)}",
                written(conversion),
                "`output: shard(-1)` and `local: false` keep the logits sharded, which `parallelizer.cross_entropy` and "
                "`F.cross_entropy` support",
                "note",
            )


def _last(conversion: Conversion) -> bool:
    return conversion.before.dim in (-1, 2)
