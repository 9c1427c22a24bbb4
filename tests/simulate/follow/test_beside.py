"""Sizes that a forward takes for those of the whole model are found by comparing it with the model alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.simulate.follow.test_whole import TP, Own, found, heads, proven


def other_scale(x: Tensor) -> Tensor:
    scale = torch.full((), float(x.shape[-1]))
    return x / x.shape[-1] + scale * 0


def put_together(x: Tensor) -> Tensor:
    made = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    made[..., : x.shape[-1]].copy_(x)
    made[..., x.shape[-1] :].copy_(x.sin())
    return made[..., : x.shape[-1]] + made[..., x.shape[-1] :]


WRONG: dict[str, tuple[Own, str]] = {
    "a scale of a part": (
        lambda x: x / x.shape[-1],
        "`div` in the root computes with 8 on a rank of tp, and with 16",
    ),
    "a power of a part's size": (lambda x: x * x.shape[-1] ** 0.5, "`mul` in the root computes with 2.82843"),
    "a scale of a part, of many": (other_scale, "`div` in the root computes with 8"),
    "heads that nobody divides": (
        lambda x: F.rms_norm(x.view(*x.shape[:2], 4, -1), (x.shape[-1] // 4,)).flatten(2),
        "`view` in the root makes [8, 8, 4, 2] on a rank of tp, and [8, 8, 4, 4] in the whole model",
    ),
    "places of a part": (
        lambda x: x * torch.arange(x.shape[-1]).sin(),
        "`arange` in the root makes [8] on a rank of tp, and [16] in the whole model",
    ),
}

RIGHT: dict[str, Own] = {
    "a scale of the whole": lambda x: x / 16,
    "a scale of a head": lambda x: (heads(x) / heads(x).shape[-1] ** 0.5).flatten(2),
    "one value of any width": lambda x: x * torch.ones(x.shape[-1]) + x.new_zeros(x.shape),
    "one part for all heads": lambda x: (
        x + x.new_ones(8).cumsum(0)[:4].expand(*heads(x).shape).transpose(1, 2).transpose(1, 2).flatten(2)
    ),
    "put into an empty one": put_together,
    "heads first": lambda x: heads(x).transpose(1, 2).contiguous().transpose(1, 2).reshape(x.shape),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_first_call_of_another_size_is_told_at_its_line(name: str) -> None:
    own, said = WRONG[name]
    (one,) = found(own, TP, "tp")
    assert one.code == "other-size" and one.message.startswith(said)
    assert [r.span.file for r in one.related if r.span is not None] == [
        "tests/simulate/follow/test_beside.py"
    ]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_another_size_cannot_be_proven(name: str) -> None:
    assert not proven(WRONG[name][0], TP, "tp")


@pytest.mark.parametrize("name", RIGHT)
def test_a_rank_s_part_is_of_the_right_size(name: str) -> None:
    assert found(RIGHT[name], TP, "tp") == ()


SPLIT_STREAM = """rules:
  up: {style: colwise, output: shard(1)}
  down: {style: rowwise, input: shard(1)}
"""


def test_a_part_of_the_sequence_is_of_the_right_size() -> None:
    """Places in it are what `local-positions` is about."""
    found_there = found(lambda x: x + torch.arange(x.shape[1])[:, None] * 0.1, SPLIT_STREAM, "tp")
    assert "other-size" not in [one.code for one in found_there]
