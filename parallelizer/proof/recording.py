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
    in order of execution, of its first call. Raises ModuleFailed.

    A compiled module is recorded from outside alone: hooks inside would be compiled too, and cut what is compiled.
    """
    new_outputs: Tensors = {}
    new_gradients: Tensors = {}
    outputs.append(new_outputs)
    gradients.append(new_gradients)

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next(
                (t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()),
                None,
            )
            if first is None or path in new_outputs:
                return
            new_outputs[path] = local_part(first.detach())
            if first.requires_grad:
                first.register_hook(lambda gradient: _keep(path, gradient))

        return hook

    def _keep(path: str, gradient: torch.Tensor) -> None:
        new_gradients.setdefault(path, local_part(gradient.detach()))

    modules = dict(seen_from_outside(model))
    handles = [module.register_forward_hook(keep(path)) for path, module in modules.items() if path]
    inside, more = _following(model, modules)
    handles += more
    try:
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


def _following(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[list[str], list[RemovableHandle]]:
    """The modules whose forward is under way, outermost first, kept up to date; empty in backward, where a
    checkpoint begins forwards that it does not end.
    """
    inside: list[str] = []

    def begin(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if inside or module is model:
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
