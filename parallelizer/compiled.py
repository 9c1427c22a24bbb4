"""The style `compile`: `torch.compile` around one module's forward.

What is compiled is what the module's `forward` is by then: tensor styles inside, context parallelism, recomputation. The
module's own hooks stay outside, FSDP's above all, which gather before the compiled code runs and free behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelizer import torch_private


def compile_forward(module: nn.Module, options: Mapping[str, Any]) -> None:
    """From now on the module's forward runs compiled, from its first call on; names and signature stay.

    `options` are the style's: `backend`, `mode`, `dynamic`, `fullgraph`.
    """
    given = compile_options(options)
    bound = module.forward
    if isinstance(bound, MethodType) and bound.__self__ is module:
        # As a method, so that a deep copy of the module runs the copy's forward.
        module.forward = MethodType(
            _on_arrived(bound.__func__, torch.compile(bound.__func__, **given)), module
        )
    else:
        module.forward = _on_arrived(bound, torch.compile(bound, **given))
    vars(module)[_COMPILED] = True


def compile_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `torch.compile` is given: the style's options that were written; a mode is inductor's alone."""
    given = {
        name: options[name]
        for name in ("backend", "mode", "dynamic", "fullgraph")
        if options.get(name) is not None
    }
    if given.get("backend", "inductor") != "inductor":
        given.pop("mode", None)
    return given


def _on_arrived(function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, given what collectives still under way bring only when it is there: torch 2.13 loses the way
    back of a gradient to such an input.
    """

    @functools.wraps(function, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = torch_private.map_pending(_Arrived.apply, (args, kwargs))
        return compiled(*args, **kwargs)

    return forward


class _Arrived(torch.autograd.Function):
    """The identity, waiting."""

    @staticmethod
    def forward(ctx: Any, pending: torch.Tensor) -> torch.Tensor:
        return torch_private.arrived(pending)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


_COMPILED = "_parallelizer_compiled"


def seen_from_outside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with their paths, without those inside compiled ones."""
    compiled: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in compiled):
            continue
        yield path, module
        if vars(module).get(_COMPILED):
            compiled.append(path)
