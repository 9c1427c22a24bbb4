"""Sizes of an argument that a forward reads, as a rank's share of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallelizer.styles.divided_sizes import divide_sizes


class Reader(nn.Module):
    """Reads the sizes of its argument in every way that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[Any, ...]:
        *_, width = x.size()
        listed = [x.shape[-1] for _ in range(1)]
        return width, x.size(-1), x.size(dim=2), x.shape[-1], *listed, self._method(x), *x.shape[:2]

    def _method(self, x: torch.Tensor) -> int:
        return x.shape[2]


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        return x.shape[-1]


class Asks(Reader):
    """Code that is not its own reads them."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[Any, ...]:
        return self.inner(x), torch.zeros_like(x).shape[-1], nn.functional.layer_norm(x, (8,)).shape[-1]


def test_what_the_modules_methods_read_is_divided() -> None:
    module = Reader()
    divide_sizes(module, {"x": [-1]}, 4)
    assert module(torch.ones(2, 3, 8)) == (2, 2, 2, 2, 2, 2, 2, 3)
    assert module(x=torch.ones(2, 3, 16)) == (4, 4, 4, 4, 4, 4, 2, 3)


def test_other_modules_and_other_tensors_have_the_sizes_that_they_have() -> None:
    module = Asks()
    divide_sizes(module, {"x": [-1], "other": [0]}, 4)
    assert module(torch.ones(2, 3, 8)) == (8, 8, 8)


def test_inside_of_what_is_compiled_they_are_divided_too() -> None:
    module = Reader()
    divide_sizes(module, {"x": [-1]}, 4)
    compiled = torch.compile(nn.Sequential(module), backend="eager")
    assert compiled(torch.ones(2, 3, 8)) == (2, 2, 2, 2, 2, 2, 2, 3)


def test_a_size_that_the_ranks_do_not_divide_is_an_error() -> None:
    module = Reader()
    divide_sizes(module, {"x": [-1]}, 3)
    with pytest.raises(ValueError, match=r"x.shape\[-1\] is 8, which 3 ranks do not divide"):
        module(torch.ones(2, 3, 8))
