"""Experts that are shared out: gradients, values and outputs are those of the unsharded module, on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from parallelizer.styles.experts.expert_list import ExpertList
from parallelizer.styles.experts.stack import stack_experts
from tests.chosen import chosen
from tests.parity import Case, Errors, asked_for, assert_exact, compare, plan
from tests.styles.experts.models import Batched, Called, Lists, Loop, Looped, Mixture, Normed, Stacked
from tests.styles.models import around

FSDP = '"": fsdp'
EXPERTS = "inner.experts: experts"
OWN = "inner.experts: {style: experts, tokens: x, ids: chosen, weights: shares, params: {w1: shard(1), w2: shard(1)}}"
NAMES = "inner.experts: {style: experts, tokens: x, ids: chosen, weights: shares}"
GATHERED = "inner.experts: {style: experts, dispatch: all-gather}"
NORMED = "inner.experts: {style: experts, whole: [norm]}"
NORM = "inner.experts.norm: {style: replicate, grad: replicate}"
WHOLE = "inner.gate: replicate"
KEEPING = "inner: {style: checkpoint, mode: selective}"
TERMS = "inner: {style: prepare-io, input: {x: replicate}, local_input: true, grad: partial, output: partial -> replicate}"
JOINED = (
    "inner: {style: prepare-io, input: {x: replicate}, local_input: true, grad: partial, output: replicate}"
)
SPLIT = "inner: {style: prepare-io, input: {x: replicate -> shard(1)}, local_input: true, output: shard(1) -> replicate}"


def rules(*lines: str) -> str:
    return "rules:\n" + "\n".join(f"  {line}" for line in lines)


class Telling(Mixture):
    """Its experts return what they chose too."""

    def __init__(self) -> None:
        super().__init__(Pair())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        made: Tensor = self.experts(flat, chosen, weights)[0]
        return made.view_as(x)


class Pair(Stacked):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return super().forward(hidden_states, top_k_index, top_k_weights), top_k_index


def own() -> nn.Module:
    return Mixture(Batched(), rows=True)


def normed() -> nn.Module:
    return Mixture(Normed())


def loop() -> nn.Module:
    return Mixture(Loop())


def lists() -> nn.Module:
    return Mixture(Lists(), rows=True)


def one_expert() -> nn.Module:
    """All tokens go to experts of the first rank; the others get none."""
    return Mixture(favourites=2)


TWO: list[tuple[str, dict[str, int], Callable[[], nn.Module], str]] = [
    ("over the data", {"dp_shard": 2, "ep": 2}, Mixture, rules(EXPERTS, FSDP)),
    ("other names and dimensions", {"dp_shard": 2, "ep": 2}, own, rules(OWN, FSDP)),
    ("a rank without tokens", {"dp_shard": 2, "ep": 2}, one_expert, rules(EXPERTS, FSDP)),
    ("over the sequence", {"cp": 2, "ep": 2}, Mixture, rules(EXPERTS, FSDP) + "\nbuffers: {batch: {input_ids: 1, labels: 1}}"),
    ("over tp, in terms", {"tp": 2, "ep": 2}, Mixture, rules(EXPERTS, WHOLE, TERMS)),
    ("over tp, joined", {"tp": 2, "ep": 2}, Mixture, rules(EXPERTS, WHOLE, JOINED)),
    ("over tp, whole", {"tp": 2, "ep": 2}, Mixture, rules(EXPERTS)),
    ("over tp, split", {"tp": 2, "ep": 2}, Mixture, rules(EXPERTS, WHOLE, SPLIT)),
    ("other names over tp", {"tp": 2, "ep": 2}, own, rules(OWN, WHOLE, SPLIT)),
    ("gathered", {"dp_shard": 2, "ep": 2}, Mixture, rules(GATHERED, FSDP)),
    ("gathered, a rank without tokens", {"dp_shard": 2, "ep": 2}, one_expert, rules(GATHERED, FSDP)),
    ("gathered over tp, in terms", {"tp": 2, "ep": 2}, Mixture, rules(GATHERED, WHOLE, TERMS)),
    ("modules", {"dp_shard": 2, "ep": 2}, Called, rules(EXPERTS, FSDP)),
    ("modules over tp, in terms", {"tp": 2, "ep": 2}, Called, rules(EXPERTS, WHOLE, TERMS)),
    ("modules, gathered", {"dp_shard": 2, "ep": 2}, Called, rules(GATHERED, FSDP)),
    ("a list in a loop", {"dp_shard": 2, "ep": 2}, loop, rules(EXPERTS, FSDP)),
    ("a list in a loop over tp", {"tp": 2, "ep": 2}, loop, rules(EXPERTS, WHOLE, TERMS)),
    ("lists and other names", {"dp_shard": 2, "ep": 2}, lists, rules(NAMES, FSDP)),
    ("a norm inside", {"dp_shard": 2, "ep": 2}, normed, rules(NORMED, FSDP)),
    ("a norm inside over tp", {"tp": 2, "ep": 2}, normed, rules(NORMED, NORM, WHOLE, TERMS)),
    ("recomputed, and kept", {"dp_shard": 2, "ep": 2}, Mixture, rules(EXPERTS, KEEPING, FSDP)),
    ("gathered, recomputed and kept", {"dp_shard": 2, "ep": 2}, Mixture, rules(GATHERED, KEEPING, FSDP)),
    ("recomputed", {"dp_shard": 2, "ep": 2}, Mixture, rules(EXPERTS, "inner: checkpoint", FSDP)),
]  # fmt: skip
FOUR: list[tuple[str, dict[str, int], Callable[[], nn.Module], str]] = [
    ("of four, two", {"dp_shard": 4, "ep": 2}, Mixture, rules(EXPERTS, FSDP)),
    ("of four, all", {"dp_shard": 4, "ep": 4}, Mixture, rules(EXPERTS, FSDP)),
    ("gathered, of four all", {"dp_shard": 2, "tp": 2, "ep": 4}, Mixture, rules(GATHERED, WHOLE, SPLIT, FSDP)),
    ("with replicas", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, Mixture, rules(EXPERTS, FSDP)),
    ("data and tp, over tp", {"dp_shard": 2, "tp": 2, "ep": 2}, Mixture, rules(EXPERTS, WHOLE, TERMS, FSDP)),
    ("a norm inside, of four two", {"dp_shard": 4, "ep": 2}, normed, rules(NORMED, FSDP)),
    ("a norm inside, data and tp", {"dp_shard": 2, "tp": 2, "ep": 4}, normed, rules(NORMED, NORM, WHOLE, TERMS, FSDP)),
    ("data and tp, over both", {"dp_shard": 2, "tp": 2, "ep": 4}, Mixture, rules(EXPERTS, WHOLE, TERMS, FSDP)),
    ("data and tp, split", {"dp_shard": 2, "tp": 2, "ep": 4}, Mixture, rules(EXPERTS, WHOLE, SPLIT, FSDP)),
    ("half of tp", {"tp": 4, "ep": 2}, Mixture, rules(EXPERTS, WHOLE, TERMS, FSDP)),
    ("a dimension that four does not divide", {"dp_shard": 4, "ep": 1}, Mixture, rules(EXPERTS, FSDP)),
    ("modules, of four two", {"dp_shard": 4, "ep": 2}, Called, rules(EXPERTS, FSDP)),
    ("a list in a loop, of four two", {"dp_shard": 4, "ep": 2}, loop, rules(EXPERTS, FSDP)),
    ("a list in a loop, data and tp", {"dp_shard": 2, "tp": 2, "ep": 4}, loop, rules(EXPERTS, WHOLE, TERMS, FSDP)),
    ("lists, of four two", {"dp_shard": 4, "ep": 2}, lists, rules(NAMES, FSDP)),
    ("other names, of four two", {"dp_shard": 4, "ep": 2}, own, rules(OWN, FSDP)),
]  # fmt: skip


def stacked(inner: Callable[[], nn.Module], text: str) -> Callable[[], nn.Module]:
    """The model with its lists of experts stacked, where it has some."""
    return lambda: stack_experts(around(inner)(), plan(text))


OF_2 = [Case(name, plan(text), mesh, stacked(inner, text)) for name, mesh, inner, text in TWO]
OF_4 = [Case(name, plan(text), mesh, stacked(inner, text)) for name, mesh, inner, text in FOUR]
ACCUMULATED = Case(
    "in two parts", plan(rules(EXPERTS, FSDP)), {"dp_shard": 2, "ep": 2}, around(Mixture), accumulate=2
)
PAIR = Case("a pair", plan(rules(EXPERTS, FSDP)), {"dp_shard": 2, "ep": 2}, around(Telling))
LOOP = Case("a loop", plan(rules(EXPERTS, FSDP)), {"dp_shard": 2, "ep": 2}, around(Looped, ExpertList))


@pytest.fixture(scope="module")
def on_2_ranks() -> dict[str, Errors | str]:
    return compare([*OF_2, ACCUMULATED, LOOP, PAIR])


@pytest.fixture(scope="module")
def on_4_ranks(request: pytest.FixtureRequest) -> dict[str, Errors | str]:
    return compare(asked_for(OF_4, request))


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in (*OF_2, ACCUMULATED)])
def test_two_ranks(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_2_ranks[name])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", chosen([case.name for case in OF_4], ("of four, two", "data and tp, over both"))
)
def test_four_ranks(name: str, on_4_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_4_ranks[name])


@pytest.mark.ranks
def test_experts_that_return_more_than_a_tensor_fail_with_the_edit(
    on_2_ranks: dict[str, Errors | str],
) -> None:
    found = on_2_ranks["a pair"]
    assert isinstance(found, str) and "it returned a tuple" in found
    assert "compute anything else outside of the module" in found


@pytest.mark.ranks
def test_a_loop_over_modules_fails_with_the_edit(on_2_ranks: dict[str, Errors | str]) -> None:
    found = on_2_ranks["a loop"]
    assert isinstance(found, str) and "call the list once, in place of the loop: self.experts(tokens" in found
