"""`precision-size`: the rows that a step gives to a linear in float8, which are a dimension of its weight's gradient."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.compiler.observe.linear_rows import linear_rows
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import BATCH_AXES
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.checks.traced_step import Traced, modules_text
from parallelizer.simulate.record.operators import GEMM
from parallelizer.styles.application import Application, Program
from parallelizer.styles.float8.recipes import DIVISOR, rows_matter

CODE = "precision-size"
HELP = "write `pad: true`, which fills them up, or use the recipe rowwise-gw-hp"


def float8_rows(traced: Traced) -> Iterator[Diagnostic]:
    """Every linear in float8 multiplies rows that kernels take, in every call of the step."""
    linears = _that_matter(traced.program)
    if not linears:
        return
    rows = _rows(traced, {a.module for a in linears})
    wrong = [a for a in linears if any(n % DIVISOR for n in rows.get(a.module, ()))]
    for alike in grouped(wrong, lambda a: a.rule.span):
        count = next(n for n in sorted(rows[alike[0].module]) if n % DIVISOR)
        yield Diagnostic(
            CODE,
            f"a rank computes {count} tokens at once in {modules_text(alike)}: float8 kernels need a multiple of {DIVISOR}",
            alike[0].rule.span,
            f"change the sizes of the batch, {HELP}",
        )


def float8_rows_unknown(program: Program) -> Iterator[Diagnostic]:
    """No linear in float8 whose rows are unknown, because values decide them, must have as many as kernels take."""
    for alike in grouped(_that_matter(program), lambda a: a.rule.span):
        yield Diagnostic(
            CODE,
            f"the step cannot be traced, so the tokens that {modules_text(alike)} computes at once are not known: float8 "
            f"kernels need a multiple of {DIVISOR}",
            alike[0].rule.span,
            HELP,
        )


def _that_matter(program: Program) -> list[Application]:
    return [a for a in program.of_slot("precision") if rows_matter(a)]


def _rows(traced: Traced, modules: set[str]) -> dict[str, set[int]]:
    """The rows of each linear on the traced rank. The stages of other ranks are taken from a forward of the whole model."""
    found: dict[str, set[int]] = {}
    for operator, _ in traced.trace.operators():
        if (
            operator.kind == GEMM
            and operator.phase == "forward"
            and operator.module in modules
            and operator.sizes
        ):
            found.setdefault(operator.module, set()).add(operator.sizes[1])
    stages, mesh, work = traced.program.stages, traced.program.mesh, traced.workload
    if stages is not None and not modules <= found.keys():
        parts = mesh.size(*BATCH_AXES) * work.accumulate * (stages.pipeline.microbatches or 1)
        whole = linear_rows(traced.model, work, max(1, work.batch_size // parts))
        # Ranks of cp share the tokens of a sequence; what is no sequence has rows that cp leaves alone.
        own = {
            p: {n if n % mesh.sizes["cp"] else n // mesh.sizes["cp"] for n in each}
            for p, each in whole.items()
        }
        found = {**own, **found}
    return found
