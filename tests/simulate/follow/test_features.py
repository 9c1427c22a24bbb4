"""Which dimension of a computed tensor is a shard of features, and where it is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallelizer.simulate.follow.varying import Varying
from parallelizer.simulate.follow.whole import TakenApart, Wholes, features_from
from parallelizer.torch_private import TorchDispatchMode


class Watching(TorchDispatchMode):
    """Shows every operator to what follows features."""

    def __init__(self) -> None:
        super().__init__()
        self.wholes = Wholes(Varying({}, lambda: "here", lambda axis: None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        read = [a for a in args if isinstance(a, Tensor)]
        self.wholes(func, args, read, [made] if isinstance(made, Tensor) else [*made])
        return made


def taken(function: Callable[[Tensor], object], shape: tuple[int, ...] = (2, 5, 24)) -> list[TakenApart]:
    watching, output = Watching(), torch.zeros(shape)
    features_from("fused", output)
    with watching:
        function(output)
    return watching.wholes.taken_apart


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: x.chunk(2, dim=-1), (1, 1)),
        (lambda x: (x + 1).relu().split([12, 6, 6], dim=2), (2, 1, 1)),
        (lambda x: x.unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4).unbind(), (1, 1, 1)),
        (lambda x: x.view(2, 5, 3, 8).transpose(0, 2)[0], ()),
        (lambda x: x.double()[..., :8], ()),
        (lambda x: x.view(10, 24)[:, 3], ()),
        (lambda x: x[0][:, 3:], ()),
    ],
)
def test_parts_of_a_fused_dimension_are_seen(
    function: Callable[[Tensor], object], sizes: tuple[int, ...]
) -> None:
    assert taken(function) == [TakenApart("fused", "here", sizes)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(2, 5, -1, 4).transpose(1, 2),  # heads
        lambda x: x.view(2, 5, -1, 12).chunk(3, dim=-1),  # heads, of which each holds its own q, k and v
        lambda x: x.view(2, 5, 6, 4)[..., ::2],
        lambda x: x.view(2, 5, 1, 24)[..., :12],  # a rank's only head, rotated half by half
        lambda x: x[:, :3].chunk(2, dim=1),
        lambda x: x.unbind(0),
        lambda x: (x @ torch.zeros(24, 6)).chunk(2, -1),
        lambda x: x[..., :],
        lambda x: x.sum(-1),
    ],
)
def test_what_every_rank_may_take_apart_is_left_alone(function: Callable[[Tensor], object]) -> None:
    assert taken(function) == []


@given(st.integers(1, 3), st.integers(2, 4), st.integers(2, 3), st.integers(2, 3))
def test_a_shard_is_one_of_the_first_factor(rows: int, first: int, second: int, ranks: int) -> None:
    """Against numbers: after the view, a rank's features are a run along the dimension that is followed."""
    watching, whole = Watching(), torch.arange(rows * first * ranks * second).view(rows, -1)
    features_from("fused", whole)
    with watching:
        seen = whole.view(rows, 1, first * ranks, second)
        seen.unbind(2)
    assert [f.projection for f in watching.wholes.taken_apart] == ["fused"]
    for shard, part in zip(
        whole.chunk(ranks, 1), whole.view(rows, 1, -1, second).chunk(ranks, 2), strict=True
    ):
        assert torch.equal(shard.reshape(-1), part.reshape(-1))
