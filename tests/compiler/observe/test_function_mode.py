"""A function mode sees what a checkpoint computes again, however its backward is begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from parallelizer.compiler.observe.function_mode import FunctionMode

Begin = Callable[[torch.Tensor, torch.Tensor], Any]


class Counting(FunctionMode):
    """Counts the sines that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.sines = 0

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.sines += func is torch.sin
        return super().call(func, args, kwargs)


WAYS: dict[str, Begin] = {
    "a tensor's backward": lambda out, x: out.sum().backward(),
    "a tensor's backward with a gradient": lambda out, x: out.backward(gradient=torch.ones_like(out)),
    "a stage's backward": lambda out, x: torch.autograd.backward([out], [torch.ones_like(out)]),
    "the backward of the last stage": lambda out, x: torch.autograd.backward([out.sum()], None),
    "the backward for some inputs": lambda out, x: torch.autograd.backward([out.sum()], inputs=[x]),
    "the backward for a stage's inputs": lambda out, x: setattr(
        x, "grad", torch.autograd.grad([out], [x], [torch.ones_like(out)])[0]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_sees_the_recomputation_and_leaves_the_gradient_as_it_is(way: str) -> None:
    x = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
    with Counting() as outer, Counting() as inner:
        out = checkpoint(torch.sin, x, use_reentrant=False)
        assert (outer.sines, inner.sines) == (1, 1)
        WAYS[way](out, x)
    assert (outer.sines, inner.sines) == (2, 2)
    torch.testing.assert_close(x.grad, x.detach().cos(), rtol=0, atol=0)
