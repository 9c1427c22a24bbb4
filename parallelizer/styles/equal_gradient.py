"""Gradients that a plan declares equal on every rank of an axis, where the tensor alone does not show it.

The tags of a followed step apply to whole tensors: if half of a gradient differs from rank to rank, the other
half is assumed to differ too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_equal: list[str] = []


def equal_axes() -> tuple[str, ...]:
    """The axes over which what is computed just now is declared to be the same."""
    return tuple(_equal)


def equal_gradient(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """The tensor as it is, whose gradient is declared to be the same on every rank of the axis."""
    result: torch.Tensor = _EqualGradient.apply(tensor, axis)
    return result


@contextmanager
def _declared(axis: str) -> Iterator[None]:
    _equal.append(axis)
    try:
        yield
    finally:
        _equal.pop()


class _EqualGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: str) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with _declared(ctx.axis):
            return gradient.view_as(gradient), None
