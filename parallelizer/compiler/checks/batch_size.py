"""Checks that the rows of the global batch divide by the data ranks and the accumulation steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.plan import BATCH_AXES

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def batch_size(state: Compilation) -> Iterator[Diagnostic]:
    """`batch_size` must divide by data ranks x accumulation."""
    work = state.workload
    if work is None:
        return
    ranks = state.mesh.size(*BATCH_AXES)
    shares = ranks * work.accumulate
    if work.batch_size % shares or work.batch_size < 1:
        sizes = [f"{a}={state.mesh.sizes[a]}" for a in BATCH_AXES if state.mesh.sizes[a] > 1]
        sizes += [f"accumulate={work.accumulate}"] if work.accumulate > 1 else []
        related = tuple(
            Related(state.mesh.spans[a], f"{a}={state.mesh.sizes[a]} is set here")
            for a in BATCH_AXES
            if a in state.mesh.spans and state.mesh.sizes[a] > 1
        )
        below, above = work.batch_size // shares * shares, (work.batch_size // shares + 1) * shares
        near = f"{below} or {above}" if below else str(above)
        yield Diagnostic(
            "batch-not-divisible",
            f"a global batch of {work.batch_size} sequences does not divide into {shares} "
            f"equal parts ({' x '.join(sizes) or 'one'})",
            work.spans.get("batch_size"),
            f"set train.batch_size={near}{_degrees(work.batch_size, work.accumulate)}",
            related=related,
        )


def _degrees(rows: int, accumulate: int) -> str:
    """The numbers of data ranks that would fit this batch."""
    if rows < 1 or rows % accumulate:
        return ""
    share = rows // accumulate
    fits = [n for n in range(1, share + 1) if share % n == 0]
    return f"; a batch of this size divides over {', '.join(map(str, fits[:12]))}{', ...' if len(fits) > 12 else ''} data ranks"
