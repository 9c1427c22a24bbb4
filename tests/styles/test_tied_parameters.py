"""Parameters under several names."""

from __future__ import annotations

import torch
from torch import nn

from parallelizer.styles.tied_parameters import parameter_names, tie, tied_names


class Tied(nn.Module):
    """Two linears with one weight, and one linear at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.c = self.d = nn.Linear(2, 2, bias=False)


def test_a_parameter_is_known_by_each_of_its_names_and_a_module_by_its_first() -> None:
    assert list(parameter_names(Tied())) == ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight"]
    assert tied_names(Tied()) == [("a.weight", "b.weight")]
    assert tied_names(nn.Linear(1, 1)) == []


def test_two_names_in_one_module_are_tied() -> None:
    module = nn.Module()
    module.a = module.b = nn.Parameter(torch.ones(1))
    assert tied_names(module) == [("a", "b")]


def test_ties_are_made_again() -> None:
    with torch.device("meta"):
        model = Tied()
    groups = tied_names(model)
    model.to_empty(device="cpu")  # gives each name a tensor of its own
    assert tied_names(model) == []
    first = model.a.weight
    tie(model, groups)
    assert model.b.weight is first
    assert tied_names(model) == groups
