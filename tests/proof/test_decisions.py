"""What a proof's values decide: both sizes of values are tried, and what took one side every time is listed."""

from __future__ import annotations

import dataclasses
import linecache

import pytest
import torch
from torch import Tensor, nn

from parallelizer.proof.decisions import Decisions
from parallelizer.proof.observe import unsharded
from parallelizer.proof.prove import prove_subject
from parallelizer.proof.subject import Subject
from parallelizer.report.text.proof import text
from tests.proof import subjects


class Limited(subjects.Mlp):
    """Features whose norm is above a limit are made shorter: a norm over all features, which a rank of tp has half of."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, input_ids: Tensor) -> Tensor:
        gate, up = self.gate_up(self.embed(input_ids)).chunk(2, dim=-1)
        hidden = gate * up
        norm = hidden.norm(dim=-1, keepdim=True)
        hidden = torch.where(norm > self.limit, hidden / norm, hidden)
        return self.head(self.down(hidden))


def limited(limit: float) -> Subject:
    subject = subjects.mlp({"tp": 2})
    return dataclasses.replace(subject, build=lambda: _filled(Limited(limit)), loud=1.0)


def _filled(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


@pytest.mark.ranks
def test_a_branch_that_small_values_never_take_is_taken_by_larger_ones() -> None:
    """By those of a scene: the steps have values of one size here."""
    assert not prove_subject(limited(30)).passed
    quiet = prove_subject(limited(1e9))  # nothing differs, and the report says why
    assert quiet.passed
    (line,) = quiet.one_sided
    assert "its condition was false for every value" in line and "torch.where(norm > self.limit" in line
    assert line in text(quiet)


class Exploding(subjects.Mlp):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * (1 + (30 * self.down.bias.square().sum() - 300).exp())


@pytest.mark.ranks
def test_a_model_that_overflows_with_larger_values_is_proven_with_its_own() -> None:
    def build() -> nn.Module:
        model = Exploding()
        nn.init.constant_(model.down.bias, 0.4)
        return model

    subject = dataclasses.replace(
        subjects.mlp({"dp_shard": 2}, subjects.MLP_PLAN.rstrip() + '\n  "": fsdp\n'), build=build
    )
    assert prove_subject(subject).passed


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(subjects.VOCAB, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if x.norm() > 1e6:
            x = x * 0
        x = x.clamp(-100, 100)
        x = x.masked_fill(x > 0, 0.5)
        return torch.where(x < 1e9, x, 0).sum(-1, keepdim=True).expand(*input_ids.shape, subjects.VOCAB)


def test_decisions_that_take_one_side_are_listed_by_their_lines() -> None:
    subject = dataclasses.replace(subjects.mlp({"dp_shard": 2}), build=Deciding)
    seen = unsharded(subject, 0, (), torch.float64, decisions=True)
    said = [line.split(": ", 1)[1] for line in seen.one_sided]
    assert said == [
        "`if x.norm() > 1e6:`: the value was false every time",
        "`x = x.clamp(-100, 100)`: no value was beyond the bound",
        "`return torch.where(x < 1e9, x, 0).sum(-1,...`: its condition was true for every value",
    ]
    for line in seen.one_sided:
        file, number, _ = line.split(":", 2)
        assert file.endswith("test_decisions.py") and linecache.getline(file, int(number)).strip()[:6] in line


def test_who_calls_the_step_is_not_looked_at() -> None:
    with Decisions("no file of this name") as taken:
        bool(torch.ones(()) > 0)
    assert [line.split(":")[0].rpartition("/")[2] for line in taken.one_sided()] == ["test_decisions.py"]
    with Decisions(__file__) as taken:
        bool(torch.ones(()) > 0)
    assert not taken.one_sided()
