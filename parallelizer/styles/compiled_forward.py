"""A module's forward under `torch.compile`, and the modules that are visible from outside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def compile_forward(module: nn.Module, **options: Any) -> None:
    """From now on the module's forward runs compiled, from its first call on; names and signature stay.

    Where a parameter is a DTensor, each size has code of its own, unless `dynamic` says something else: torch 2.13 makes
    code for all sizes when a second one comes, and fails, or takes minutes, at DTensors of symbolic sizes.
    """
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        options.setdefault("dynamic", False)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        made = torch.compile(function, **options)

        # What a collective still under way brings is waited for before: torch 2.13 loses the way back of a gradient to
        # such an input.
        @functools.wraps(function, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            return made(*map(arrived, args), **{name: arrived(value) for name, value in kwargs.items()})

        return forward

    bound = module.forward
    if isinstance(bound, MethodType) and bound.__self__ is module:
        # As a method, so that a deep copy of the module runs the copy's forward.
        module.forward = MethodType(compiled(bound.__func__), module)
    else:
        module.forward = compiled(bound)


def arrived(value: Any) -> Any:
    """An argument with the tensors of collectives that are under way, which torch hands out as a class of their own,
    waited for.
    """
    if isinstance(value, torch.Tensor):
        return Arrived.apply(value) if hasattr(value, "trigger_wait") else value
    if type(value) in (tuple, list):
        return type(value)(map(arrived, value))
    if type(value) is dict:
        return {key: arrived(one) for key, one in value.items()}
    return value


class Arrived(torch.autograd.Function):
    """The identity, waiting."""

    @staticmethod
    def forward(ctx: Any, pending: Any) -> torch.Tensor:
        plain: torch.Tensor = pending.wait()
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


_COMPILED = "_parallelizer_compiled"


def mark_compiled(module: nn.Module) -> None:
    """Remember that the module's forward runs compiled."""
    vars(module)[_COMPILED] = True


def compiled_modules(model: nn.Module) -> list[str]:
    """The paths of the compiled modules that are not inside another one."""
    return [path for path, module in seen_from_outside(model) if vars(module).get(_COMPILED)]


def seen_from_outside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with their paths, without those inside compiled ones.

    Hooks belong on these only. A hook inside a compiled module is compiled with it: it breaks the graph, or becomes a
    guard that differs from layer to layer, so that each layer is compiled on its own.
    """
    compiled: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in compiled):
            continue
        yield path, module
        if vars(module).get(_COMPILED):
            compiled.append(path)
