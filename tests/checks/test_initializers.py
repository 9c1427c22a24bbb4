"""A model on meta must know how to make its values."""

from __future__ import annotations

import torch
from torch import nn

import parallelizer as pz
from parallelizer.plan import Mesh
from tests.findings import finding, findings
from tests.parity import plan
from tests.test_step import llama

TEXT = "rules: {'**': {style: checkpoint}}"


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2))


def test_modules_with_tensors_of_their_own_need_an_initializer() -> None:
    found = finding(TEXT, lambda: nn.Sequential(nn.Linear(2, 2), Bare(), Bare(), Table()))
    assert (found.code, found.span) == ("no-initializer", None)
    assert found.message == "{1..3} (Bare, Table) cannot make its values"
    assert finding(TEXT, Bare).message == "the root (Bare) cannot make its values"


def test_those_that_have_one_or_nothing_to_make_are_fine() -> None:
    assert findings(TEXT, llama()) == ()
    assert findings(TEXT, lambda: nn.Sequential(nn.Dropout(), nn.LayerNorm(2))) == ()


def test_a_model_with_values_needs_none() -> None:
    assert pz.compile(plan(TEXT), Bare(), Mesh({})).diagnostics == ()
