"""A model whose ranks hold other values is refused before it is made parallel."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import parallelizer as pz
from parallelizer.language.plan import Mesh
from tests.parity import plan
from tests.ranks import run_ranks


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


RULES = 'rules: {"0": colwise, "1": rowwise, "": fsdp}'


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_replicate": 2, "tp": 2}, {"tp": 4}])
def test_ranks_that_hold_other_values_are_refused_on_every_rank(axes: dict[str, int]) -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh(axes), "cpu")
        model = built(seed=int(dist.get_rank() == 2))
        before = {n: p.clone() for n, p in model.named_parameters()}
        with pytest.raises(ValueError, match=r"hold different values in .*manual_seed"):
            pz.parallelize(model, plan(RULES), mesh)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())

    run_ranks(worker, 4)


@pytest.mark.ranks
def test_a_model_that_is_sharded_already_is_refused() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
        model = built(seed=0)
        fully_shard(model[0])
        with pytest.raises(ValueError, match=r"sharded already: 0\..* Leave out `fully_shard`"):
            pz.parallelize(model, plan(RULES), mesh)

    run_ranks(worker, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}])
def test_an_optimizer_of_before_is_refused_at_the_first_step(axes: dict[str, int]) -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh(axes), "cpu")
        model = built(seed=0)
        early = torch.optim.AdamW(model.parameters())
        pz.parallelize(model, plan(RULES), mesh)
        batch = {"input": torch.ones(2, 8)}
        with pytest.raises(ValueError, match=r"Build the optimizer after parallelizer\.parallelize"):
            pz.train_step(model, batch, summed, early)
        pz.train_step(model, batch, summed, torch.optim.AdamW(model.parameters()))

    run_ranks(worker, 2)


def summed(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return output.sum(), torch.tensor(float(len(output)))


@pytest.mark.ranks
def test_one_parameter_that_differs_is_named() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
        model = built(seed=0)
        with torch.no_grad():
            model[1].bias[3] += dist.get_rank() * 1e-7
        with pytest.raises(
            ValueError, match=r"the ranks of dp_shard hold different values in 1\.bias\. Build"
        ):
            pz.parallelize(model, plan(RULES), mesh)
        pz.parallelize(model, plan(RULES), mesh, check_values=False)

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_a_buffer_that_differs_is_named_also_one_that_is_not_saved() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
        for saved in (True, False):
            model = built(seed=0)
            model[0].register_buffer("table", torch.full((4,), float(dist.get_rank())), persistent=saved)
            with pytest.raises(
                ValueError, match=r"the ranks of dp_shard hold different values in 0\.table\."
            ):
                pz.parallelize(model, plan(RULES), mesh)

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_equal_values_and_models_on_meta_pass() -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2, "tp": 2}), "cpu")
        whole = built(seed=0).state_dict()
        model = pz.parallelize(built(seed=0), plan(RULES), mesh)
        assert all(torch.equal(t, whole[n]) for n, t in pz.whole_state_dict(model).items())
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        pz.parallelize(model, plan(RULES), mesh)

    run_ranks(worker, 4)
