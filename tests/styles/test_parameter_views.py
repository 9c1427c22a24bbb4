"""What a module's forward sees in place of its parameters, and what everybody else goes on seeing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from parallelizer.styles.parameter_views import run_on_views


class Sees(nn.Module):
    """Returns what it sees as its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, fail: bool = False) -> torch.Tensor:
        if fail:
            raise ZeroDivisionError
        return self.weight * 1


def test_forward_sees_a_view_and_gradients_come_back_through_it() -> None:
    module = Sees()
    run_on_views(module, {"weight": lambda w: w * 3})
    out = module()
    assert out.tolist() == [3, 6]
    out.sum().backward()
    assert module.weight.grad is not None and module.weight.grad.tolist() == [3, 3]


def test_nothing_is_left_after_forward_not_even_after_a_failing_one() -> None:
    module = Sees()
    param = module.weight
    run_on_views(module, {"weight": lambda w: w * 3})
    module()
    with pytest.raises(ZeroDivisionError):
        module(fail=True)
    assert module.weight is param
    assert [n for n, _ in module.named_parameters()] == ["weight"]
    assert list(module.state_dict()) == ["weight"]


def test_views_lie_over_each_other() -> None:
    module = Sees()
    run_on_views(module, {"weight": lambda w: w + 1})
    run_on_views(
        module, {"weight": lambda w: w * 10}
    )  # the later one is further out, and sees the parameter first
    assert module().tolist() == [11, 21]


def test_a_deep_copy_sees_its_own_parameters() -> None:
    module = Sees()
    run_on_views(module, {"weight": lambda w: w * 3})
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
    assert other().tolist() == [0, 0]
    assert module().tolist() == [3, 6]


def test_a_failing_view_leaves_nothing() -> None:
    module = Sees()

    def fails(_: Any) -> torch.Tensor:
        raise ZeroDivisionError

    run_on_views(module, {"weight": fails})
    with pytest.raises(ZeroDivisionError):
        module()
    assert isinstance(module.weight, nn.Parameter)
