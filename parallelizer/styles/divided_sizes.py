"""Sizes that a forward reads from the shape of an argument, divided by the ranks that share what they count.

A forward that says `B, T, C = x.size()` and later `y.view(B, T, C)` takes the features of the whole stream for those of its
heads. On a rank with a part of the heads that number is to be a part of it too, as an attribute of `divide` is. Only what
the module's own methods read is divided: code of other modules and of torch sees the tensor as it is. Such a module runs as
it is written inside of one that is compiled.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.styles.wrap_forward import wrap_forward

SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
"""What a function mode is asked about where a `shape` is read."""


MODES = ("__torch_function__", "call", "_stated_size", "asked_by")
INNER = ("<genexpr>", "<listcomp>", "<lambda>")


def asked_by(module: nn.Module) -> bool:
    """Whether what a function mode is asked about is code of a method of the module."""
    frame = sys._getframe(1)
    # Other modes hand a call on; a comprehension belongs to the function that it stands in.
    while frame.f_back is not None and frame.f_code.co_name in (*MODES, *INNER):
        frame = frame.f_back
    names = frame.f_code.co_varnames
    return bool(names) and frame.f_locals.get(names[0]) is module


class DividedSizes(TorchFunctionMode):
    """On while `module` runs: `size` and `shape` of these tensors, by id, are divided along some dimensions."""

    def __init__(
        self, module: nn.Module, tensors: Mapping[int, tuple[str, Sequence[int]]], ranks: int
    ) -> None:
        super().__init__()
        self.module, self.tensors, self.ranks = module, tensors, ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.Tensor.size and func != SHAPE:
            return result
        if id(args[0]) not in self.tensors or not asked_by(self.module):
            return result
        name, dims = self.tensors[id(args[0])]
        whole = func(args[0])
        sizes = list(whole)
        for dim in dims:
            if sizes[dim] % self.ranks:
                raise ValueError(
                    f"{name}.shape[{dim}] is {sizes[dim]}, which {self.ranks} ranks do not divide"
                )
            sizes[dim] //= self.ranks
        if isinstance(result, torch.Size):
            return torch.Size(sizes)
        return sizes[args[1] if len(args) > 1 else kwargs["dim"]]


def divide_sizes(module: nn.Module, sizes: Mapping[str, Sequence[int]], ranks: int) -> None:
    """Divide the sizes that forward reads of its arguments: dimensions by the argument's name."""
    signature = inspect.signature(module.forward)

    @torch.compiler.disable  # it would take `shape` from the tensor, and ask no mode
    def divided(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        tensors = {id(given[name]): (name, dims) for name, dims in sizes.items() if name in given}
        with DividedSizes(module, tensors, ranks):
            return forward(*args, **kwargs)

    def around(
        module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return divided(module, forward, args, kwargs)

    wrap_forward(module, around)
