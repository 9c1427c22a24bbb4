"""Sums over the tokens of all ranks, for statistics: what a balancing loss or a bias of experts is computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class _TokenRanks:
    """The groups whose ranks have different tokens, of the model that was made parallel last in this process."""

    def __init__(self) -> None:
        self.world: Any = None
        self.groups: tuple[dist.ProcessGroup, ...] = ()
        self.instead: list[Callable[[Tensor], Tensor]] = []


_current = _TokenRanks()


def sum_over_batch(tensor: Tensor) -> Tensor:
    """The sum of this tensor over all ranks that have other tokens of the batch: those of the data axes and of `cp`. The tensor
    itself in a process alone, so a model with it runs without a plan too.

    Call it in a model's forward, or in a loss, on sums over the tokens of this rank, before anything that is not linear in
    them. Gradients pass: that of the result is summed over the same ranks, so it is right for a loss that is added up over
    ranks, as `train_step` does. Under gradient accumulation each part of the batch has its own sum, and so has each
    microbatch of a pipeline. The ranks are those of the model that was made parallel last. Collective: where one
    of these ranks calls it, all must.
    """
    if _current.instead:
        return _current.instead[-1](tensor)
    alive = dist.is_initialized() and dist.group.WORLD is _current.world
    if not alive or not _current.groups:
        return tensor
    summed: Tensor = _Sum.apply(tensor, _current.groups)
    return summed


def sums_go_over(groups: Sequence[dist.ProcessGroup]) -> None:
    """A model is made parallel, whose tokens differ between the ranks of these groups."""
    _current.world, _current.groups = dist.group.WORLD, tuple(groups)


@contextmanager
def summing_by(instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, `sum_over_batch` is this function."""
    _current.instead.append(instead)
    try:
        yield
    finally:
        _current.instead.pop()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return _reduced(tensor, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _reduced(gradient, ctx.groups), None


def _reduced(tensor: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    summed = tensor.contiguous().clone()
    for group in groups:
        dist.all_reduce(summed, group=group)
    return summed
