"""Wrapping one module's forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelizer.styles.wrap_forward import wrap_forward


class Adds(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        """The sum."""
        return x + self.n * (2 if twice else 1)


def doubled(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return 2 * forward(*args, **kwargs)


def test_calls_go_through_what_is_around() -> None:
    module = Adds(1)
    wrap_forward(module, doubled)
    assert module(torch.tensor(3)) == 8
    assert module(torch.tensor(3), twice=True) == 10
    wrap_forward(module, doubled)
    assert module(torch.tensor(3)) == 16


def test_signature_and_documentation_stay() -> None:
    module = Adds(1)
    before = inspect.signature(module.forward)
    wrap_forward(module, doubled)
    assert inspect.signature(module.forward) == before
    assert module.forward.__doc__ == "The sum."


def test_other_modules_of_the_class_stay_as_they_are() -> None:
    module, other = Adds(1), Adds(1)
    wrap_forward(module, doubled)
    assert other(torch.tensor(3)) == 4


def test_a_deep_copy_runs_its_own_forward() -> None:
    module = Adds(1)
    wrap_forward(module, doubled)
    wrap_forward(module, doubled)
    other = copy.deepcopy(module)
    other.n = 2
    assert other(torch.tensor(3)) == 20
    assert module(torch.tensor(3)) == 16


def test_a_forward_that_is_no_method_is_wrapped_too() -> None:
    module = Adds(1)
    module.forward = lambda x: x * 5  # type: ignore[method-assign, assignment]
    wrap_forward(module, doubled)
    assert module(torch.tensor(3)) == 30


def test_marks_on_the_function_are_not_copied() -> None:
    module = Adds(1)
    bound = module.forward
    bound.__func__.mark = True  # type: ignore[attr-defined]
    try:
        wrap_forward(module, doubled)
        assert not hasattr(module.forward, "mark")
    finally:
        del bound.__func__.mark  # type: ignore[attr-defined]
