"""Checks that the rows of every batch entry can be cut into the microbatches of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def microbatch_entries(state: Compilation) -> Iterator[Diagnostic]:
    """Dim 0 of an entry must be the batch; or 1, or declared as the sequence in the plan: then every microbatch has all of it."""
    if state.workload is None or state.mesh.sizes["pp"] == 1:
        return
    for name, entry in state.workload.entries.items():
        declared = state.plan.batch.get(name)
        is_sequence = declared is not None and declared.dim == 0
        if not entry.shape or entry.shape[0] in ("batch", 1) or is_sequence:
            continue
        shape = f"[{', '.join(map(str, entry.shape))}]"
        yield Diagnostic(
            "microbatch-entry",
            f"the batch entry {name} of shape {shape} cannot be cut into microbatches: its dim 0 is not the batch",
            declared.span if declared is not None else state.workload.spans.get(f"batch.{name}"),
            _help(name, entry.shape),
        )


def _help(name: str, shape: tuple[str | int, ...]) -> str:
    if "batch" in shape:
        return f"let the batch be dim 0 of {name}, and transpose it in the model's forward"
    if shape[0] == "sequence":
        return (
            f"declare it in the plan, `buffers: {{batch: {{{name}: 0}}}}`: then every microbatch has all of it; or give "
            "it a first dim of size 1"
        )
    return f"give {name} a first dim of size 1, so that every microbatch has all of it, or a row for each sequence"
