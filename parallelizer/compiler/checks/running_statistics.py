"""Buffers that a forward updates from its inputs differ from rank to rank, because buffers are not reduced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import DATA_AXES

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation

KINDS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Modules with running statistics. `SyncBatchNorm`, which computes its own over all ranks, is none of them."""


def running_statistics(state: Compilation) -> Iterator[Diagnostic]:
    """No norm with statistics of its own rank, where ranks see different tokens."""
    axes = [a for a in DATA_AXES if state.mesh.sizes[a] > 1]
    found = {
        path: type(module).__name__
        for path, module in state.modules.items()
        if isinstance(module, KINDS) and module.track_running_stats and module.training
    }
    if not axes or not found:
        return
    what = ", ".join(fold_paths(list(found))[:3]) or "the root"
    sizes = ", ".join(f"{a}={state.mesh.sizes[a]}" for a in axes)
    yield Diagnostic(
        "rank-local-buffers",
        f"the running statistics of {what} ({', '.join(sorted(set(found.values())))}) would differ between the ranks of {sizes}",
        None,
        "use nn.SyncBatchNorm.convert_sync_batchnorm or a norm without statistics, or freeze the module with .eval()",
        related=tuple(
            Related(state.mesh.spans[a], f"{a}={state.mesh.sizes[a]} is set here")
            for a in axes
            if a in state.mesh.spans
        ),
    )
