"""The mean over all ranks' tokens, in a loop of one's own."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallelizer as pz
from tests.parity import plan
from tests.ranks import run_ranks
from tests.runtime.test_step import llama

PLAN = plan("extends: llama")


def test_alone_it_is_the_mean_and_so_is_its_gradient() -> None:
    losses = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    mean = pz.mean_loss(losses.sum(), 3, nn.Linear(1, 1))
    mean.backward()
    assert mean.item() == 3.0 and mean.dtype == torch.float64
    assert losses.grad is not None and losses.grad.tolist() == [1 / 3] * 3


@pytest.mark.ranks
def test_ranks_with_unequal_numbers_of_labels_weigh_by_them() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(pz.Mesh({"dp_replicate": 2, "tp": 2}), "cpu")
        with torch.device("meta"):
            model = llama(n_layers=1)()
        pz.parallelize(model, PLAN, mesh)
        place, _ = pz.batch_rank(mesh)
        one = torch.ones((), dtype=torch.float64, requires_grad=True)
        total, weight = one * (10.0, 8.0)[place], torch.tensor((5, 1)[place])
        for wrapped in (model, nn.Sequential(model)):  # as frameworks hand a model back
            one.grad = None
            mean = pz.mean_loss(total, weight, wrapped)
            mean.backward(retain_graph=True)
            assert mean.item() == 3.0  # where the mean of means is 5
            assert one.grad is not None and one.grad.item() == pytest.approx(
                (10 / 6, 8 / 6)[place], rel=1e-15
            )
        with pytest.raises(ValueError, match="Linear was not made parallel by a plan, and there are 4 ranks"):
            pz.mean_loss(total, weight, nn.Linear(1, 1))
        assert dist.get_world_size() == 4

    run_ranks(worker, 4)


@pytest.mark.ranks
def test_under_cp_a_batch_that_nobody_split_is_told_and_a_split_one_is_not() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(pz.Mesh({"cp": 2}), "cpu")
        with torch.device("meta"):
            model = llama(n_layers=1)()
        pz.parallelize(model, PLAN, mesh)
        with pytest.warns(UserWarning, match="cp=2, and no batch was split"):
            pz.mean_loss(torch.ones(()), 4, model)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        pz.shard_batch({"input_ids": tokens, "labels": tokens}, PLAN, mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pz.mean_loss(torch.ones(()), 4, model)

    run_ranks(worker, 2)
