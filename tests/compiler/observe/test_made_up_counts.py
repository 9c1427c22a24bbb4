"""Rows whose number only values tell."""

from __future__ import annotations

import torch

from parallelizer import torch_private
from parallelizer.compiler.observe.made_up_counts import ROWS, made_up, without_masks

aten = torch.ops.aten


def test_places_that_are_looked_for_are_so_many() -> None:
    with torch_private.FakeTensors():
        places = made_up(aten.nonzero.default, [torch.ones(5, 7)])
    assert places is not None and places.shape == (ROWS, 2)
    assert made_up(aten.relu.default, [torch.ones(3)]) is None


def test_a_mask_stands_for_an_index_along_each_of_its_dimensions() -> None:
    with torch_private.FakeTensors():
        tensor, mask = torch.ones(5, 7, 3), torch.ones(5, 7, dtype=torch.bool)
        _, (first, second) = without_masks(aten.index.Tensor, [tensor, [mask]])
        assert first.shape == second.shape == (ROWS,)
        assert aten.index.Tensor(tensor, [first, second]).shape == (ROWS, 3)
