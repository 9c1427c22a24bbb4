"""Experts that are linears of their own are proven in float8, those that get no token too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.proof import Proof
from parallelizer.testing import assert_equivalent
from tests.chosen import chosen
from tests.proof import subjects

pytest.importorskip("torchao", reason="float8 needs torchao")

WIDTH = 32
EXPERTS = 4
BUSY = 3
"""The last expert gets no token."""


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Mixture(nn.Module):
    """A token goes to the expert of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(subjects.VOCAB, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, subjects.VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        rows, chosen = x.flatten(0, 1), input_ids.flatten() % BUSY
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (of_expert,) = torch.where(chosen == number)
            made = made.index_add(0, of_expert, expert(rows[of_expert]))
        out: Tensor = self.head(x + made.view_as(x))
        return out


def prove(recipe: str, mesh: dict[str, int], *rules: str) -> Proof:
    lines = [
        f"experts.*.*: {{style: float8, recipe: {recipe}}}",
        "experts.*.up: colwise",
        "experts.*.down: rowwise",
        "'': fsdp",
        *rules,
    ]
    plan = subjects.plan("version: 1\nrules:\n" + "".join(f"  {line}\n" for line in lines))
    return assert_equivalent(Mixture, plan, mesh, loss=subjects.token_loss, batch=subjects.token_batch)


PROVEN = [
    *((recipe, {"tp": 2}) for recipe in ("tensorwise", "rowwise", "rowwise-gw-hp")),
    ("rowwise-gw-hp", {"dp_shard": 2}),
    ("rowwise-gw-hp", {"dp_shard": 2, "tp": 2}),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(PROVEN, [("rowwise-gw-hp", {"dp_shard": 2, "tp": 2})]), ids=str)
def test_experts_that_are_linears_are_proven(case: tuple[str, dict[str, int]]) -> None:
    proof = prove(*case)
    assert proof.passed and proof.proven
    assert len(proof.float8) == 2 * EXPERTS


@pytest.mark.ranks
@pytest.mark.slow
def test_they_are_proven_inside_of_checkpoints() -> None:
    assert prove("rowwise-gw-hp", {"dp_shard": 2}, "experts.*: checkpoint").passed


@pytest.mark.ranks
@pytest.mark.slow
def test_scales_of_tokens_that_cannot_be_told_apart_are_no_proof() -> None:
    with pytest.raises(PlanError, match="the tokens of ranks cannot be told apart") as raised:
        prove("rowwise", {"dp_shard": 2})
    assert "rowwise-gw-hp" in (raised.value.diagnostics[0].help or "")
