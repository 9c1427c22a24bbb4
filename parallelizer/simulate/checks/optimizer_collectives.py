"""`optimizer-collectives`: an optimizer that communicates for each parameter."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.traced_step import Traced, sent_text


def optimizer_collectives(traced: Traced) -> Iterator[Diagnostic]:
    """More collectives in the optimizer than parameters: it reduces for each of them, or more than once."""
    calls = [e for e in traced.trace.ledger if e.phase == "optimizer"]
    parameters = sum(p.requires_grad for p in traced.model.parameters())
    if len(calls) <= parameters:
        return
    fused = traced.optimizer.get("fused", "auto")
    help_text = "use an optimizer that works on local shards, such as a fused AdamW"
    if fused is False:
        help_text = "set optim.fused=true: one kernel updates the local shards, without collectives"
    kinds = ", ".join(f"{kind} over {axis}" for kind, axis in dict.fromkeys((e.kind, e.axis) for e in calls))
    yield Diagnostic(
        "optimizer-collectives",
        f"the optimizer communicates for each of its {parameters:,} parameters ({kinds}): {sent_text(calls)}",
        traced.optimizer_span,
        help_text,
        "warning",
    )
