"""What every module puts out and which gradient comes back, and which module failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.pipeline.actions import Action
from parallelizer.runtime.pipeline import progress
from parallelizer.runtime.pipeline.live import LivePipeline
from parallelizer.runtime.state import state_of
from parallelizer.styles.compiled_forward import seen_from_outside
from parallelizer.torch_private import tree_leaves

Tensors = dict[str, torch.Tensor]


class ModuleFailed(RuntimeError):
    """A module's forward raised: which, and what, in one line."""

    def __init__(self, module: str, error: Exception) -> None:
        first = (str(error).strip().splitlines() or [""])[0]
        super().__init__(module, f"{type(error).__name__}: {first}".rstrip(": "))
        self.module, self.reason = self.args


@contextmanager
def recording(model: nn.Module, outputs: list[Tensors], gradients: list[Tensors]) -> Iterator[None]:
    """Append what the modules compute meanwhile: of each the first output tensor and its gradient, by its path
    in order of execution, of its first call, or of that for each microbatch of the first part. Raises ModuleFailed.
    A stage does not record a module whose first call is another stage's.

    A compiled module is recorded from outside alone: hooks inside would be compiled too, and cut what is compiled.
    """
    new_outputs: Tensors = {}
    new_gradients: Tensors = {}
    outputs.append(new_outputs)
    gradients.append(new_gradients)
    state = state_of(model)
    pipeline = None if state is None else state.pipeline
    now = [0, 0]  # the part of the step and its microbatch
    parts: dict[str, dict[int, torch.Tensor]] = {}
    part_gradients: dict[str, dict[int, torch.Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next(
                (t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()),
                None,
            )
            part, at = now
            seen = parts.setdefault(path, {})
            if first is None or part or at in seen:
                return
            seen[at] = local_part(first.detach())
            if first.requires_grad:
                first.register_hook(lambda gradient: _keep(path, at, gradient))

        return hook

    def _keep(path: str, at: int, gradient: torch.Tensor) -> None:
        part_gradients.setdefault(path, {}).setdefault(at, local_part(gradient.detach()))

    def tell(mark: Any) -> None:
        if isinstance(mark[1], Action):
            now[:] = mark[0], mark[1].microbatch

    modules = {p: m for p, m in seen_from_outside(model) if not _begun_elsewhere(p, pipeline)}
    handles = [module.register_forward_hook(keep(path)) for path, module in modules.items() if path]
    inside, more = _following(model, modules, pipeline is not None)
    handles += more
    for stage in pipeline.models.values() if pipeline is not None else ():
        stage.watch()  # which leaves the forward, behind the hooks from here
    try:
        with progress.listening(tell):
            yield
    except PlanError:
        raise
    except Exception as error:
        if inside:
            raise ModuleFailed(inside[-1], error) from error
        raise
    finally:
        for handle in handles:
            handle.remove()
        for path, seen in parts.items():
            if seen:
                new_outputs[path] = _together([seen[at] for at in sorted(seen)])
        for path, found in part_gradients.items():  # in order of the backward pass
            seen = parts[path]
            alike = len(seen) > 1 and new_outputs[path].shape == next(iter(seen.values())).shape
            in_order = [found[at] for at in sorted(found)]
            new_gradients[path] = torch.stack(in_order).sum(0) if alike else torch.cat(in_order)


def _begun_elsewhere(path: str, pipeline: LivePipeline | None) -> bool:
    """Whether the first call of a module is on another rank's stage, although the module is on this one too."""
    stages = () if pipeline is None else (model.stage for model in pipeline.models.values())
    return any(
        index == 0 and (path == unit or path.startswith(f"{unit}."))
        for stage in stages
        for unit, index in stage.elsewhere
    )


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """What a module returned for the microbatches, in one tensor; what belongs to no row, such as a rotary table, is the same
    for all of them. One value everywhere, such as zeros, says nothing about rows.
    """
    first = parts[0]
    if len(parts) == 1 or not first.ndim:
        return first
    constant = first.numel() > 0 and bool((first == first.flatten()[0]).all())
    if not constant and all(torch.equal(part, first) for part in parts[1:]):
        return first
    return torch.cat(parts)


def _following(
    model: nn.Module, modules: Mapping[str, nn.Module], cut: bool
) -> tuple[list[str], list[RemovableHandle]]:
    """The modules whose forward is under way, outermost first, kept up to date; empty in backward, where a
    checkpoint begins forwards that it does not end. Of a model that is `cut` nobody calls the root.
    """
    inside: list[str] = []

    def begin(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if inside or cut or module is model:
                inside.append(path)

        return hook

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if inside:
            inside.pop()

    # Before every other hook of the module, and behind all that there are: these may be what fails.
    handles = [
        module.register_forward_pre_hook(begin(path), prepend=True) for path, module in modules.items()
    ]
    return inside, handles + [module.register_forward_hook(end) for module in modules.values()]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
