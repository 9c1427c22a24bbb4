"""The JSON documents that scripts read. Keys may be added, never renamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from parallelizer.diagnostics.diagnostic import Diagnostic, has_errors, in_order

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.simulate.record.trace import Trace
    from parallelizer.styles.application import Program


def validate_document(diagnostics: Iterable[Diagnostic]) -> dict[str, Any]:
    """What `validate --json` prints."""
    ordered = in_order(diagnostics)
    return {"valid": not has_errors(ordered), "diagnostics": [d.as_json() for d in ordered]}


def refusal_document(diagnostics: Iterable[Diagnostic]) -> dict[str, Any]:
    """What a command prints with `--json` when there is no program to speak of."""
    return {"diagnostics": [d.as_json() for d in in_order(diagnostics)]}


def plan_document(
    program: Program,
    model: nn.Module,
    device: str,
    rank: int = 0,
    trace: Trace | None = None,
    diagnostics: Iterable[Diagnostic] | None = None,
) -> dict[str, Any]:
    """What `plan --json` prints: one rank's figures, sizes in bytes; no collectives or memory without a
    trace.
    """
    from parallelizer.compiler.parameter_shards import parameter_shards
    from parallelizer.simulate.record.ledger import totals

    return {
        "world_size": program.mesh.world_size,
        "mesh": dict(program.mesh.sizes),
        "device": device,
        "rank": rank,
        "diagnostics": [
            d.as_json() for d in in_order(program.diagnostics if diagnostics is None else diagnostics)
        ],
        "applications": [
            {
                "module": a.module,
                "slot": a.slot,
                "style": a.style,
                "axis": "+".join(a.axes) or None,
                "rule": {"key": a.rule.key, "file": a.rule.span.file, "line": a.rule.span.line},
            }
            for a in program
        ],
        "parameters": [
            {
                "name": s.name,
                "dtype": s.dtype,
                "global_shape": list(s.global_shape),
                "local_shape": list(s.local_shape),
                "placements": dict(s.placements),
                "bytes": s.bytes,
            }
            for s in parameter_shards(program, model, rank)
        ],
        "collectives": totals(trace.ledger) if trace else [],
        "ledger": [e.as_json() for e in trace.ledger] if trace else [],
        "memory": _memory(trace) if trace else None,
        "rank_classes": [c.as_json() for c in trace.classes] if trace else [],
        "buffers": {
            "batch": {n: b.make or b.dim for n, b in program.plan.batch.items()},
            "model": {n: b.dim for n, b in program.plan.buffers.items()},
            "balance": program.plan.balance,
        },
    }


def _memory(trace: Trace) -> dict[str, Any]:
    """What lives at the peak, by kind; the kinds add up to it."""
    usage = trace.memory
    return {**usage.at_peak, "peak": usage.peak, "peak_phase": usage.phase, "peak_module": usage.module}
