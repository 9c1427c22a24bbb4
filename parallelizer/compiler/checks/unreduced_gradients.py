"""Checks that fsdp sums the gradients of ranks that process different tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import DATA_AXES, EXPERT, EXPERT_SHARDS, full_name

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.compiler.compilation import Compilation


def unreduced_gradients(state: Compilation) -> Iterator[Diagnostic]:
    """Every trainable parameter must belong to an fsdp unit when a data axis is above 1, and those of experts that are shared
    out when `ep` leaves some ranks of a replica.
    """
    shared = {
        full_name(a.module, name) for a in state.applications if a.slot == "experts" for name in a.params
    }
    rest = {n: p for n, p in state.parameters.items() if n not in shared}
    experts = {n: p for n, p in state.parameters.items() if n in shared}
    yield from _missing(state, rest, DATA_AXES)
    yield from _missing(state, experts, ("dp_replicate", EXPERT_SHARDS))


def _missing(
    state: Compilation, parameters: Mapping[str, nn.Parameter], over: Sequence[str]
) -> Iterator[Diagnostic]:
    axes = [a for a in over if state.mesh.size_of(a) > 1]
    if not axes or not parameters:
        return
    reduced: set[str] = set()
    for application in state.applications:
        if application.slot == "fsdp":
            prefix = f"{application.module}." if application.module else ""
            reduced.update(prefix + name for name in application.params)
    missing = [n for n, p in parameters.items() if n not in reduced and p.requires_grad]
    if not missing:
        return
    what = ", ".join(fold_paths(missing)[:3])
    if len(missing) == len(state.parameters):
        what = "any parameter"
    sizes = ", ".join(f"{a}={state.mesh.size_of(a)}" for a in axes)
    yield Diagnostic(
        "unreduced-gradients",
        f"no rule sums the gradients of {what} over {sizes}",
        state.mesh.spans.get(EXPERT if axes[0] == EXPERT_SHARDS else axes[0]),
        f'add `"": fsdp` to the rules of {state.plan.file}',
    )
