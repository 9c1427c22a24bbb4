"""Each module is in the mode after an evaluation that it was in before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.runtime.eval_mode import eval_mode


class Frozen(nn.Module):
    """A norm whose author froze it, and a part of a frozen one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).eval()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
        self.inner[1].train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(self.norm(x))
        return output


def modes(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


BEFORE = {"": True, "norm": False, "inner": False, "inner.0": False, "inner.1": True}


def test_every_module_is_in_eval_mode_inside_and_as_before_outside() -> None:
    model = Frozen()
    assert modes(model) == BEFORE
    with eval_mode(model):
        assert not any(modes(model).values())
    assert modes(model) == BEFORE


def test_so_it_is_where_the_evaluation_fails() -> None:
    model = Frozen()
    with pytest.raises(KeyError), eval_mode(model):
        raise KeyError
    assert modes(model) == BEFORE


def test_evaluate_wakes_no_module_that_is_frozen() -> None:
    model = Frozen()

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return output.square().sum(), torch.tensor(float(output.numel()))

    pz.evaluate(model, [{"x": torch.ones(2, 4)}], loss)
    assert modes(model) == BEFORE
