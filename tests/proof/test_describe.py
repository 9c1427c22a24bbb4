"""Differences in words."""

from __future__ import annotations

import pytest
import torch

from parallelizer.language.plan import Mesh
from parallelizer.proof.describe import axes_of, data_first, describe, factor_words, ratio

MESH = Mesh({"dp_shard": 3, "tp": 2})
WHOLE = torch.arange(1, 25, dtype=torch.float64).view(2, 4, 3).sin()


def _one_token() -> torch.Tensor:
    other = WHOLE.clone()
    other[:, 2] += 1 + WHOLE[:, 1]
    return other


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (None, "is missing"),
        (WHOLE[:1], "has the shape [1, 4, 3], the reference [2, 4, 3]"),
        (WHOLE * float("nan"), "is not finite"),
        (WHOLE * 0, "is zero"),
        (WHOLE * 2, "is tp (2) times the reference"),
        (WHOLE / 3, "is 1/dp_shard (1/3) of the reference"),
        (WHOLE * 6, "is dp_shard x tp (6) times the reference"),
        (WHOLE * 1.25, "is 1.25 times the reference"),
        (WHOLE * -1, "is -1 times the reference"),
        (WHOLE.flip(1), "has the right values in another order: a permutation"),
        (WHOLE + 1e-8 * (9 * WHOLE).cos(), "noise, of the size that float32 rounds away"),
        (WHOLE + torch.tensor([1.0, 2.0, 3.0]), "by the same vector at every position, as a bias would be"),
        (_one_token(), "at 2 of 4 along dimension 1 only"),
    ],
)
def test_a_difference_is_said_in_words(mine: torch.Tensor | None, words: str) -> None:
    assert words in describe(mine, WHOLE, MESH)


def test_a_factor_needs_every_element() -> None:
    assert ratio(WHOLE * 2, WHOLE) == pytest.approx(2)
    assert ratio(_one_token(), WHOLE) is None


def test_axes_of_one_size_are_all_named() -> None:
    mesh = Mesh({"dp_shard": 2, "tp": 2})
    assert axes_of(2, mesh) == ["dp_shard", "tp"]
    assert axes_of(4, mesh) == ["dp_shard x tp"]
    assert factor_words(2, mesh) == "dp_shard or tp (2) times"


def test_of_axes_of_one_size_a_data_axis_is_meant_if_all_gradients_are_off() -> None:
    assert data_first(["dp_shard", "tp"], everywhere=True) == "dp_shard"
    assert data_first(["dp_shard", "tp"], everywhere=False) == "tp"
    assert data_first([], everywhere=True) is None


def test_a_difference_from_zero_has_no_size() -> None:
    assert describe(WHOLE * 1e-20, WHOLE * 0, MESH) == "is not zero, as the reference is"
