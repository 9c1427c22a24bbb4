"""Checks that fsdp sums the gradients of ranks that process different tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import DATA_AXES

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def unreduced_gradients(state: Compilation) -> Iterator[Diagnostic]:
    """Every trainable parameter must belong to an fsdp unit when a data axis is above 1."""
    axes = [a for a in DATA_AXES if state.mesh.sizes[a] > 1]
    if not axes:
        return
    reduced: set[str] = set()
    for application in state.applications:
        if application.slot == "fsdp":
            prefix = f"{application.module}." if application.module else ""
            reduced.update(prefix + name for name in application.params)
    missing = [n for n, p in state.parameters.items() if n not in reduced and p.requires_grad]
    if not missing:
        return
    what = ", ".join(fold_paths(missing)[:3])
    if len(missing) == len(state.parameters):
        what = "any parameter"
    sizes = ", ".join(f"{a}={state.mesh.sizes[a]}" for a in axes)
    yield Diagnostic(
        "unreduced-gradients",
        f"no rule sums the gradients of {what} over {sizes}",
        state.mesh.spans.get(axes[0]),
        f'add `"": fsdp` to the rules of {state.plan.file}',
    )
