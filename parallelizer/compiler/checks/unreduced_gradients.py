"""Checks that fsdp sums the gradients of ranks that process different tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import DATA_AXES, EXPERT, EXPERT_SHARDS, TENSOR_AXES, full_name

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.compiler.compilation import Compilation


def unreduced_gradients(state: Compilation) -> Iterator[Diagnostic]:
    """Every trainable parameter must belong to an fsdp unit when a data axis is above 1, and those of experts that are shared
    out when `ep` leaves some ranks of a replica. What lies inside of experts and is none of theirs needs a sum over tp.
    """
    shared = {
        full_name(a.module, name) for a in state.applications if a.slot == "experts" for name in a.params
    }
    rest = {n: p for n, p in state.parameters.items() if n not in shared}
    experts = {n: p for n, p in state.parameters.items() if n in shared}
    yield from _missing(state, rest, DATA_AXES)
    yield from _missing(state, experts, ("dp_replicate", EXPERT_SHARDS))
    yield from _inside_of_experts(state, shared)


def _inside_of_experts(state: Compilation, shared: Collection[str]) -> Iterator[Diagnostic]:
    """What lies whole inside of experts sees other rows on every rank of tp too."""
    axes = [a for a in TENSOR_AXES if state.mesh.sizes[a] > 1]
    paths = [a.module for a in state.applications if a.slot == "experts"]
    if not axes or not paths:
        return
    summed = {
        full_name(a.module, name)
        for a in state.applications
        if a.slot == "params" and {*axes} & {*a.axes} and a.options.get("grad") != "replicate"
        for name in a.params
    }
    missing = [
        name
        for name, param in state.parameters.items()
        if param.requires_grad
        and name not in shared
        and name not in summed
        and any(name.startswith(f"{path}.") for path in paths)
    ]
    if not missing:
        return
    modules = fold_paths(list(dict.fromkeys(name.rpartition(".")[0] for name in missing)))
    yield Diagnostic(
        "unreduced-gradients",
        f"no rule sums the gradients of {', '.join(modules[:3])} over {', '.join(f'{a}={state.mesh.sizes[a]}' for a in axes)}: "
        "inside of experts each rank has other rows",
        state.mesh.spans.get(axes[0]),
        f"add `{modules[0]}: replicate` to the rules of {state.plan.file}",
    )


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
