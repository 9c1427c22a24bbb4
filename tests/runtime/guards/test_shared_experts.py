"""Ranks that share experts out hold different ones, which is no drift; copies of an expert that differ are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.runtime.guards.drift import find_drift
from tests.parity import plan, token_batch, token_loss
from tests.ranks import run_ranks
from tests.runtime.guards.planted import adam, mesh_of
from tests.styles.experts.models import Mixture
from tests.styles.models import around

PLAN = 'rules: {inner.experts: experts, "": fsdp}'


def trained(**sizes: int) -> tuple[nn.Module, Any]:
    ep = sizes.pop("ep")
    mesh = pz.share_experts(mesh_of(**sizes), ep)
    with torch.device("meta"):
        model = around(Mixture)()
    model = pz.materialize(pz.apply(pz.compile(plan(PLAN), model, mesh), model, mesh), device="cpu", seed=3)
    optimizer, (index, ranks) = adam(model), pz.batch_rank(mesh)
    rows = {name: tensor.chunk(ranks)[index] for name, tensor in token_batch().items()}
    pz.train_step(model, [rows], token_loss, optimizer, 1.0)
    return model, optimizer


def found(plant: tuple[str, int] | None, **sizes: int) -> list[Any]:
    """What the ranks find, with 1 added to a parameter on one rank."""

    def worker() -> Any:
        model, optimizer = trained(**sizes)
        if plant is not None and torch.distributed.get_rank() == plant[1]:
            param = dict(model.named_parameters())[plant[0]]
            assert isinstance(param, DTensor)
            with torch.no_grad():
                param.to_local().add_(1)
        return [(one.name, one.state, one.ranks, one.among) for one in find_drift(model, optimizer)]

    every = run_ranks(worker, torch.tensor([s for n, s in sizes.items() if n != "ep"]).prod().item())
    assert all(one == every[0] for one in every)
    return every[0]


@pytest.mark.ranks
def test_experts_of_other_ranks_raise_no_alarm() -> None:
    assert found(None, dp_shard=2, ep=2) == []


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 2, "tp": 2, "ep": 4},
        {"dp_shard": 4, "tp": 2, "ep": 2},  # the bias lies alike on what ep leaves
    ],
    ids=str,
)
def test_a_step_on_any_mesh_raises_no_alarm(sizes: dict[str, int]) -> None:
    assert found(None, **sizes) == []


@pytest.mark.ranks
@pytest.mark.slow
def test_copies_of_an_expert_that_differ_are_named() -> None:
    assert found(("inner.experts.up", 3), dp_replicate=2, dp_shard=2, ep=2) == [
        ("inner.experts.up", "", (1, 3), (1, 3))
    ]
    assert found(("inner.experts.bias", 5), dp_shard=4, tp=2, ep=2) == [
        ("inner.experts.bias", "", (5,), (1, 3, 5, 7))
    ]
