"""The JSON documents that scripts read. Keys may be added, never renamed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from parallelizer.diagnostics.diagnostic import Diagnostic, has_errors, in_order

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.diagnostics.diagnostic import Span
    from parallelizer.language.plan import Rule
    from parallelizer.proof.compare import Difference
    from parallelizer.proof.divergence import Divergence
    from parallelizer.proof.proof import Proof
    from parallelizer.report.explanation import Answer, Explanation
    from parallelizer.report.rows.experts import Sharing
    from parallelizer.simulate.record.trace import Trace
    from parallelizer.simulate.time.predict import StepTime
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
    time: StepTime | None = None,
    full: StepTime | None = None,
    shared: Sharing | None = None,
    plain: Trace | None = None,
) -> dict[str, Any]:
    """What `plan --json` prints: one rank's figures, sizes in bytes; no collectives or memory without a
    trace, and no time where nothing is known of the hardware. `plain` is the traced step of the plan without
    float8 and `full` its time, and `shared` says how experts are shared out.
    """
    from parallelizer.compiler.parameter_shards import parameter_shards
    from parallelizer.report.rows.collectives import collective_rows
    from parallelizer.report.rows.messages import message_rows
    from parallelizer.report.rows.precision import precision
    from parallelizer.report.rows.stages import pipeline_document, stage_rows

    in_float8 = precision(program, model, trace, plain)
    return {
        "world_size": program.mesh.world_size,
        "mesh": program.mesh.every,
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
                "rule": _rule(a.rule),
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
        "collectives": [row.as_json() for row in collective_rows(trace.ledger)] if trace else [],
        "ledger": [e.as_json() for e in trace.ledger] if trace else [],
        "memory": _memory(trace) if trace else None,
        "memory_not_counted": sorted(trace.uncounted) if trace else [],
        "time": _time(time) if time else None,
        "precision": {**in_float8.as_json(), "seconds_without": full.seconds if full else None}
        if in_float8
        else None,
        "experts": shared.as_json() if shared else None,
        "rank_classes": [c.as_json() for c in trace.classes] if trace else [],
        "pipeline": pipeline_document(program) if program.stages else None,
        "stages": [row.as_json() for row in stage_rows(program, model)] if program.stages else [],
        "messages": [row.as_json() for row in message_rows(program, trace.cuts)]
        if trace and program.stages
        else [],
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


def _time(time: StepTime) -> dict[str, Any]:
    """Seconds, with the range, and where they go."""
    return {
        "machine": time.machine,
        "seconds": time.seconds,
        "low": time.low,
        "high": time.high,
        "mfu": time.mfu,
        "causal_mfu": time.causal_mfu,
        "tokens_per_second_per_device": time.tokens_per_second,
        "compute": dict(time.compute),
        "waits": dict(time.waits),
        "collectives": dict(time.links),
        "modules": dict(time.modules),
    }


def _rule(rule: Rule) -> dict[str, Any]:
    return {"key": rule.key, "file": rule.span.file, "line": rule.span.line}


def explain_document(answer: Answer) -> dict[str, Any]:
    """What `explain PATH --json` prints: every module or parameter by itself."""
    return {
        "path": answer.word,
        "mesh": answer.setup.mesh.every,
        "explanations": [_explanation(explanation) for explanation in answer.explanations],
        "diagnostics": [d.as_json() for d in in_order(answer.diagnostics)],
    }


def _explanation(one: Explanation) -> dict[str, Any]:
    from parallelizer.compiler.wording import dims

    return {
        "module": one.module,
        "parameter": one.parameter,
        "type": one.kind,
        "rules": [
            {
                **_rule_in_full(m.rule),
                "slots": [
                    {
                        "slot": slot,
                        "outcome": outcome if isinstance(outcome, str) else "loses",
                        "to": None if isinstance(outcome, str) else _rule_in_full(outcome),
                    }
                    for slot, outcome in m.outcomes
                ],
            }
            for m in one.rules
        ],
        "slots": [
            {
                "slot": f.slot,
                "style": f.style,
                "axis": "+".join(f.axes) or None,
                "rule": _rule_in_full(f.rule),
                "effect": f.effect,
                "reason": f.reason or None,
                "options": [
                    {
                        "name": v.name,
                        "value": v.text,
                        "source": v.source,
                        "layouts": v.layouts or None,
                        "file": v.span.file if v.span else None,
                        "line": v.span.line if v.span else None,
                    }
                    for v in f.values
                ],
                "tensors": list(f.flows),
                "notes": list(f.notes),
            }
            for f in one.slots
        ],
        "units": [{"module": u.module, "rule": _rule_in_full(u.rule)} for u in one.units],
        "parameters": [
            {
                "name": s.name,
                "dtype": s.dtype,
                "global_shape": list(s.global_shape),
                "local_shape": list(s.local_shape),
                "placements": dict(s.placements),
                "dimensions": dims(s),
                "bytes": s.bytes,
                "reason": s.reason,
            }
            for s in one.parameters
        ],
    }


def _rule_in_full(rule: Rule) -> dict[str, Any]:
    return {**_rule(rule), "column": rule.span.column}


def verify_document(proof: Proof | None, diagnostics: Iterable[Diagnostic] = ()) -> dict[str, Any]:
    """What `verify --json` prints, as docs/proving.md says. Without a proof, because the plan was refused or a
    rank failed, the diagnostics alone.
    """
    from parallelizer.report.rows.proof import error_rows, loss_error

    found = [d.as_json() for d in in_order(diagnostics)]
    if proof is None:
        return {"passed": False, "proven": None, "verdict": False, "diagnostics": found}
    worst = next(iter(proof.worst(1)), None)
    reference, sharded = proof.losses
    return {
        "passed": proof.passed,
        "proven": proof.proven,
        "verdict": proof.is_verdict,
        "ranks": proof.mesh.world_size,
        "mesh": proof.mesh.every,
        "dtype": proof.dtype,
        "shrunk": list(proof.changes),
        "rule": {"text": "error <= c*eps*sqrt(n)", "c": proof.verdict.constant} if proof.is_verdict else None,
        "loss": {
            "reference": _number(reference),
            "sharded": _number(sharded),
            "relative_error": _number(loss_error(proof)),
        },
        "parameters": [
            {
                "name": row.name,
                "gradient_error": None if row.gradient is None else _number(row.gradient),
                "update_error": _number(row.update),
            }
            for row in error_rows(proof)
        ],
        "worst": _worst(worst, proof.is_verdict) if worst else None,
        "unequal": list(proof.unequal),
        "broken_axes": None if proof.broken_axes is None else list(proof.broken_axes),
        "mixed_rows": _place(proof.mixed_rows),
        "departure": _place(proof.departure),
        "first_divergence": _divergence(proof.divergence) if proof.divergence else None,
        "one_sided": list(proof.one_sided),
        "float8": [
            {
                "module": one.module,
                "recipe": one.recipe,
                "output_error": None if one.output is None else _number(one.output),
                "gradient_error": None if one.gradient is None else _number(one.gradient),
            }
            for one in proof.float8
        ],
        "diagnostics": found,
    }


def _worst(difference: Difference, judged: bool) -> dict[str, Any]:
    """Without a verdict no bound is meant."""
    return {
        "name": difference.name,
        "what": difference.what,
        "step": difference.step,
        "error": _number(difference.error),
        "bound": _number(difference.bound) if judged else None,
        "share": _number(difference.share) if judged else None,
    }


def _place(span: Span | None) -> str | None:
    return None if span is None else f"{span.file}:{span.line}"


def _divergence(found: Divergence) -> dict[str, Any]:
    return {
        "module": found.module,
        "phase": found.phase,
        "axis": found.axis,
        "rule": _rule(found.rule) if found.rule else None,
        "description": found.description,
    }


def _number(value: float) -> float:
    """JSON has no infinity: what is missing or not finite is as wrong as a number can be."""
    return value if math.isfinite(value) else sys.float_info.max
