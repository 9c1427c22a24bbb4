"""Gradients that FSDP reduces while they lie partial over tp: they are the whole ones, however they come together, and are summed
once, in the dtype of the parameter.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.runtime.partial_gradients import sum_partial
from parallelizer.styles.fsdp import sum_instead_of_average
from parallelizer.styles.fsdp_partial import keep_partial, summed_behind
from tests.findings import on_meta
from tests.parity import plan, token_batch
from tests.ranks import run_ranks
from tests.runtime.test_step import llama

SIZE = 5
"""Not divisible by the ranks."""


class Scale(nn.Module):
    """Multiplies rows by a replicated weight. Rows that are split over tp give it a partial gradient, whole rows a whole one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        ones = torch.ones(SIZE, dtype=torch.float64)
        self.weight = nn.Parameter(distribute_tensor(ones, mesh["tp"], [Replicate()]))
        self.mesh = mesh["tp"]

    def forward(self, rows: Tensor, ways: str) -> Tensor:
        placed = {"split": Shard(0), "whole": Replicate()}
        each = [distribute_tensor(rows, self.mesh, [placed[way]]) * self.weight for way in ways.split("+")]
        return torch.stack([cast(DTensor, one.sum()).full_tensor() for one in each]).sum()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("steps", "times", "partial"),
    [
        ("split", 1, True),
        ("whole", 1, False),
        ("split split", 2, True),
        ("split whole", 2, True),
        ("whole split", 2, False),
        ("split+whole", 2, None),
        ("kept:split split", 2, True),
        ("kept:split kept:whole split+whole", 4, True),
        ("kept:whole split", 2, False),
        ("split sum split", 2, False),  # added to a sum
        ("split sum whole", 2, False),
    ],
)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)])
def test_however_gradients_come_together(
    steps: str, times: int, partial: bool | None, sizes: tuple[int, int]
) -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
        model = Scale(mesh)
        fully_shard(model, mesh=mesh["dp_shard"])
        sum_instead_of_average(model)
        keep_partial(model)
        rows = torch.arange(4.0 * SIZE, dtype=torch.float64).reshape(4, SIZE)
        own = rows + mesh.get_local_rank("dp_shard")
        for step in steps.split():
            ways = step.removeprefix("kept:")
            if ways == "sum":
                sum_partial(model.parameters())
                continue
            model.set_requires_gradient_sync(step == ways)  # type: ignore[operator]
            with summed_behind():
                model(own, ways).backward()
        gradient = model.weight.grad
        assert isinstance(gradient, DTensor)
        if partial is not None:
            assert gradient.placements == (Shard(0), Partial() if partial else Replicate())
        whole = times * sum((rows + rank).sum(0) for rank in range(sizes[0]))
        torch.testing.assert_close(gradient.full_tensor(), whole, rtol=1e-12, atol=0.0)
        sum_partial(model.parameters())
        assert isinstance(model.weight.grad, DTensor)
        assert model.weight.grad.placements == (Shard(0), Replicate())
        torch.testing.assert_close(model.weight.grad.full_tensor(), whole, rtol=1e-12, atol=0.0)

    run_ranks(worker, sizes[0] * sizes[1])


@pytest.mark.ranks
@pytest.mark.parametrize("earlier", [True, False])
def test_a_penalty_on_the_shards_themselves_counts_once(earlier: bool) -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
        model = Scale(mesh)
        fully_shard(model, mesh=mesh["dp_shard"])
        sum_instead_of_average(model)
        keep_partial(model)
        rows = torch.arange(4.0 * SIZE, dtype=torch.float64).reshape(4, SIZE)
        for _ in range(2):  # the hooks of the shard are there from the first forward on
            model.zero_grad()

            def penalty() -> Tensor:
                return 50 * cast(DTensor, (cast(DTensor, model.weight) ** 2).sum()).full_tensor()

            with summed_behind():
                first = penalty() if earlier else None
                output = model(rows, "split")
                (output + (penalty() if first is None else first)).backward()
            sum_partial(model.parameters())
            assert isinstance(model.weight.grad, DTensor)
            expected = rows.sum(0) + 100
            torch.testing.assert_close(model.weight.grad.full_tensor(), expected, rtol=1e-12, atol=0.0)

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_sixteen_bit_gradients_are_added_up_in_float32() -> None:
    def worker() -> float:
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_shard", "tp"))
        model = Scale(mesh).float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
        keep_partial(model)
        rows = torch.tensor([512.0, 2, 2, 2]).unsqueeze(1).expand(4, SIZE).contiguous()
        with summed_behind():
            model(rows, "split").backward()
        sum_partial(model.parameters())
        assert isinstance(model.weight.grad, DTensor) and model.weight.grad.dtype == torch.float32
        return model.weight.grad.to_local()[0].item()

    # 512 + 2 is 512 in bfloat16.
    assert run_ranks(worker, 4) == [518.0] * 4


def all_reduces(seen: CommDebugMode) -> int:
    return sum(n for kind, n in seen.get_comm_counts().items() if "allreduce" in str(kind).replace("_", ""))


def split_llama(sizes: dict[str, int]) -> tuple[nn.Module, dict[str, Tensor]]:
    model = on_meta(llama()).double()
    mesh = pz.build_mesh(Mesh(sizes), "cpu")
    pz.parallelize(model, plan("extends: llama"), mesh)
    pz.materialize(model, device="cpu", seed=5)
    return model, pz.shard_batch(token_batch(), plan("extends: llama"), mesh)


@pytest.mark.ranks
def test_backward_has_no_all_reduce_over_tp_and_the_sum_has_one() -> None:
    def worker() -> tuple[int, int, int]:
        model, batch = split_llama({"dp_shard": 2, "tp": 2})
        total = pz.cross_entropy(model(batch["input_ids"]), batch["labels"])
        loss = pz.mean_loss(total, batch["labels"].numel(), model)
        with CommDebugMode() as during, summed_behind():
            loss.backward()
        gradients = [p.grad for p in model.parameters() if isinstance(p.grad, DTensor)]
        partial = [g for g in gradients if any(placement.is_partial() for placement in g.placements)]
        with CommDebugMode() as behind:
            sum_partial(model.parameters())
        return len(partial), all_reduces(during), all_reduces(behind)

    assert run_ranks(worker, 4) == [(2 * 2 + 1, 0, 1)] * 4


@pytest.mark.ranks
def test_in_a_loop_of_ones_own_fsdp_sums_and_hooks_see_whole_gradients() -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
        model = Scale(mesh)
        fully_shard(model, mesh=mesh["dp_shard"])
        keep_partial(model)
        seen: list[Tensor] = []
        model.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(cast(DTensor, p.grad).to_local())
        )
        rows = torch.arange(4.0 * SIZE, dtype=torch.float64).reshape(4, SIZE)
        for _ in range(2):
            model(rows, "split").backward()
        gradient = model.weight.grad
        assert isinstance(gradient, DTensor) and gradient.placements == (Shard(0), Replicate())
        torch.testing.assert_close(seen[-1], 2 * rows.sum(0), rtol=1e-12, atol=0.0)

    run_ranks(worker, 2)
