"""Limits the share of a model that is replicated without a rule; off unless a preset sets the limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import full_name

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def unsharded_share(state: Compilation) -> Iterator[Diagnostic]:
    """Parameters that no rule shards, nor replicates on purpose, are at most `max_unsharded` of all."""
    limit = state.max_unsharded
    if limit is None or state.mesh.world_size == 1:
        return
    on_purpose = {
        full_name(application.module, name)
        for application in state.applications
        for name, placements in application.params.items()
        if application.slot == "params" or any(p.dim is not None for p in placements.values())
    }
    sizes = {name: p.numel() for name, p in state.parameters.items()}
    left = sorted((n for n in sizes if n not in on_purpose), key=lambda n: -sizes[n])
    share = sum(sizes[n] for n in left) / max(sum(sizes.values()), 1)
    if share <= limit.value:
        return
    folded = fold_paths(left)
    more = f" and {len(folded) - 3} more" if len(folded) > 3 else ""
    yield Diagnostic(
        "unsharded-parameters",
        f"{share:.1%} of the parameters are whole on every rank, and no rule asks for it: {', '.join(folded[:3])}{more}",
        limit.span,
        f"give them a style (`replicate` for parameters that should be whole), or raise max_unsharded above {limit.value:g}",
    )
