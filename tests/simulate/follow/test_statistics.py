"""Which statistics over tokens a forward takes of one rank's alone, and what is none or is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.child.children import in_children
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.simulate.checks.local_statistics import local_statistics
from parallelizer.simulate.follow.statistics import FollowedStatistics, follow_statistics
from parallelizer.styles.application import Program
from tests.parity import plan

WORKLOAD = Workload({"input_ids": Entry(("batch", "sequence"), range=(0, 16))}, batch_size=8, seq_len=8)
EXPERTS = 4

Statistics = Callable[["Model", Tensor, Tensor], Tensor | None]


class Model(nn.Module):
    """What it takes of the router's scores [rows, tokens, experts] and of the experts chosen, as numbers, is given."""

    def __init__(self, take: Statistics) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(16, 8), nn.Linear(8, EXPERTS)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.take = take

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.embed(input_ids)
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.topk(2, -1).indices, EXPERTS).sum(-2).to(x.dtype)
        return x, self.take(self, scores, chosen)


def switch(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    return (chosen.mean((0, 1)) * scores.mean((0, 1))).sum()


def flattened(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    both = [
        torch.cat([t.flatten(0, 1)] * 2) for t in (chosen, scores)
    ]  # of two layers, as transformers has it
    return (both[0].mean(0) * both[1].mean(0)).sum()


def masked_mean(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    return (scores * chosen).sum() / chosen.sum()


def variance_of_load(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    return chosen.flatten(0, 1).sum(0).var() + scores.sum()


def tokens_of_experts(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    return scores.flatten(0, 1).topk(3, 0).values


def signed(model: Model, scores: Tensor, chosen: Tensor) -> None:
    with torch.no_grad():
        load = torch.histc(chosen, EXPERTS, 0, EXPERTS)
        model.bias += 0.1 * (load.mean() - load).sign()


def counted(model: Model, scores: Tensor, chosen: Tensor) -> None:
    with torch.no_grad():
        model.bias.add_(chosen.sum((0, 1)))


def assigned(model: Model, scores: Tensor, chosen: Tensor) -> None:
    model.bias = model.bias + chosen.detach().sum((0, 1))


LOCAL = {
    switch: ("mul", ""), flattened: ("mul", ""), masked_mean: ("div", ""), variance_of_load: ("var", ""),
    tokens_of_experts: ("topk", ""), signed: ("add", "bias"), counted: ("add", "bias"), assigned: ("a new value", "bias"),
}  # fmt: skip


def by_row(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    return (chosen.mean(1) * scores.mean(1)).sum(-1)


def z_loss(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    return scores.logsumexp(-1).square().sum() * 1e-3


def mean_of_tokens(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    return scores.square().mean()


def only_looked_at(model: Model, scores: Tensor, chosen: Tensor) -> None:
    switch(model, scores, chosen)


def of_all_ranks(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    tokens = pz.sum_over_batch(scores.new_tensor(scores.shape[0] * scores.shape[1]))
    load, wanted = (pz.sum_over_batch(t.sum((0, 1))) / tokens for t in (chosen, scores))
    with torch.no_grad():
        model.bias += (load.mean() - load).sign()
    return (load * wanted).sum()


def sorted_tokens(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
    flat = scores.flatten(0, 1)
    order = chosen.flatten(0, 1).argmax(-1).argsort()
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    return flat[order][back]


RIGHT = [by_row, z_loss, mean_of_tokens, only_looked_at, of_all_ranks, sorted_tokens]


def program(mesh: Mesh) -> Program:
    return Program(plan('rules: {"": fsdp}'), mesh, ())


def followed(take: Statistics) -> FollowedStatistics:
    with torch.device("meta"):
        model = Model(take)
    return in_loss(model, _loss)


def in_loss(model: nn.Module, loss: Any) -> FollowedStatistics:
    [found] = in_children([(follow_statistics, program(Mesh({"dp_shard": 2})), model, WORKLOAD, loss)])
    return found


@pytest.mark.parametrize("take", LOCAL, ids=lambda take: take.__name__)
def test_what_one_rank_cannot_know_is_found_at_its_line(take: Statistics) -> None:
    (found,) = followed(take).found
    assert (found.operator, found.buffer) == LOCAL[take]
    assert found.written is not None and found.written.file.endswith("test_statistics.py")


@pytest.mark.parametrize("take", RIGHT, ids=lambda take: take.__name__)
def test_what_is_right_is_left_alone(take: Statistics) -> None:
    assert followed(take).found == ()


def test_what_is_said_of_it() -> None:
    mesh = Mesh({"dp_shard": 2})
    (said,) = local_statistics(program(mesh), followed(switch))
    assert said.severity == "warning" and said.code == "local-statistics"
    assert "`mul` takes a sum over the tokens of one rank of dp_shard=2" in said.message
    (said,) = local_statistics(program(mesh), followed(signed))
    assert "updates bias from the tokens of one rank of dp_shard=2 alone" in said.message


def test_parts_of_a_batch_are_followed_too() -> None:
    with torch.device("meta"):
        model = Model(switch)

    def codes(accumulate: int) -> set[str]:
        workload = dataclasses.replace(WORKLOAD, accumulate=accumulate)
        found = pz.validate(model, plan('rules: {"": fsdp}'), Mesh({}), workload=workload, loss=_loss)
        return {one.code for one in found}

    assert "local-statistics" in codes(2) and "local-statistics" not in codes(1)


@pytest.mark.slow
def test_parts_of_a_sequence_are_followed_too() -> None:
    with torch.device("meta"):
        model = Model(switch)
    text = 'buffers: {batch: {input_ids: 1}}\nrules: {"": fsdp}'
    found = pz.validate(model, plan(text), Mesh({"cp": 2}), workload=WORKLOAD, loss=_loss)
    (said,) = (one for one in found if one.code == "local-statistics")
    assert "of one rank of cp=2" in said.message


def _loss(output: tuple[Tensor, Tensor | None], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    total, count = output[0].sum(), batch["input_ids"].numel()
    return total if output[1] is None else total + output[1].sum() * count, count


def test_a_loss_is_followed_too_and_its_own_mean_is_a_sum_again() -> None:
    def handed_on(model: Model, scores: Tensor, chosen: Tensor) -> Tensor:
        return torch.stack([scores, chosen])

    def of_the_batch(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores, chosen = output[1]
        count = (batch["input_ids"] != 3).sum()
        return output[0].sum() / count * count + (
            scores.mean((0, 1)) * chosen.mean((0, 1))
        ).sum() * count, count

    with torch.device("meta"):
        model = Model(handed_on)
    (found,) = in_loss(model, of_the_batch).found
    assert found.operator == "mul" and found.written is not None
