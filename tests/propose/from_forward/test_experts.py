"""Modules of experts are found by what they are given and hold, whatever their names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallelizer.propose.from_forward.experts import experts
from parallelizer.propose.from_forward.seen import Seen, SeenCall
from tests.styles.experts.models import EXPERTS, HIDDEN, Batched, Stacked
from tests.styles.models import WIDTH

ROWS, CHOSEN = 6, 2


def seen(given: dict[str, tuple[int, ...]], whole: str) -> Seen:
    """A call of the module `inner`, whose argument `whole` has integers."""
    call = SeenCall("inner", {name: at for at, name in enumerate(given)}, 0)
    call.floats = tuple(name for name in given if name != whole)
    return Seen(calls=[call], shapes=dict(enumerate(given.values())))


def around(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"inner": module})


USUAL = {"hidden_states": (ROWS, WIDTH), "top_k_index": (ROWS, CHOSEN), "top_k_weights": (ROWS, CHOSEN)}
OTHERS = {"x": (2, 3, WIDTH), "shares": (2, 3, CHOSEN), "chosen": (2, 3, CHOSEN)}


class OneMore(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH)), nn.Parameter(torch.empty(3))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("it is only looked at")


def test_the_usual_signature_needs_no_options() -> None:
    assert experts(around(Stacked()), seen(USUAL, "top_k_index")) == {"inner": "experts"}


def test_other_names_and_dimensions_are_written() -> None:
    assert experts(around(Batched()), seen(OTHERS, "chosen")) == {
        "inner": "{style: experts, tokens: x, ids: chosen, weights: shares, params: {w1: shard(1), w2: shard(1)}}"
    }


@pytest.mark.parametrize(
    "inner", [OneMore, Uneven, lambda: nn.Linear(WIDTH, WIDTH)], ids=["norm", "sizes", "linear"]
)
def test_a_module_whose_parameters_do_not_count_experts_is_none(inner: Callable[[], nn.Module]) -> None:
    assert experts(around(inner()), seen(USUAL, "top_k_index")) == {}


@pytest.mark.parametrize(
    "given",
    [
        {"hidden_states": (ROWS, WIDTH), "top_k_index": (ROWS, CHOSEN)},
        {**USUAL, "top_k_weights": (ROWS, CHOSEN + 1)},
        {**USUAL, "hidden_states": (ROWS + 1, WIDTH)},
        {**USUAL, "more": (ROWS, WIDTH)},
    ],
    ids=["no weights", "other weights", "other rows", "two of tokens"],
)
def test_a_module_that_is_given_something_else_is_none(given: dict[str, tuple[int, ...]]) -> None:
    assert experts(around(Stacked()), seen(given, "top_k_index")) == {}
