"""Gradients that FSDP reduces while they lie partial over tp: they are the whole ones, however they come together, and are summed
once, in the dtype of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

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
from parallelizer.styles.partial_gradients import keep_partial
from tests.findings import on_meta
from tests.parity import CLIP, plan, token_batch
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
def test_sixteen_bit_gradients_are_added_up_in_float32() -> None:
    def worker() -> float:
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_shard", "tp"))
        model = Scale(mesh).float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
        keep_partial(model)
        rows = torch.tensor([512.0, 2, 2, 2]).unsqueeze(1).expand(4, SIZE).contiguous()
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


def backward(model: nn.Module, batch: dict[str, Tensor]) -> None:
    total = pz.cross_entropy(model(batch["input_ids"]), batch["labels"])
    pz.mean_loss(total, batch["labels"].numel(), model).backward()


@pytest.mark.ranks
def test_backward_has_no_all_reduce_over_tp_and_the_sum_has_one() -> None:
    def worker() -> tuple[int, int, int]:
        model, batch = split_llama({"dp_shard": 2, "tp": 2})
        total = pz.cross_entropy(model(batch["input_ids"]), batch["labels"])
        loss = pz.mean_loss(total, batch["labels"].numel(), model)
        with CommDebugMode() as during:
            loss.backward()
        gradients = [p.grad for p in model.parameters() if isinstance(p.grad, DTensor)]
        partial = [g for g in gradients if any(placement.is_partial() for placement in g.placements)]
        with CommDebugMode() as behind:
            sum_partial(model.parameters())
        return len(partial), all_reduces(during), all_reduces(behind)

    assert run_ranks(worker, 4) == [(2 * 2 + 1, 0, 1)] * 4


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "for": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
def test_a_loop_that_never_sums_takes_the_same_steps(name: str, clip: bool) -> None:
    """DTensor sums what lies partial, in torch's own clipping and optimizers."""

    def worker() -> None:
        found: list[dict[str, Tensor]] = []
        for own in (False, True):
            model, batch = split_llama({"dp_shard": 2, "tp": 2})
            groups: Any = pz.parameter_groups(model.parameters(), 0.0)
            optimizer = OPTIMIZERS[name](groups)
            for _ in range(2):
                backward(model, batch)
                if not own:
                    sum_partial(model.parameters())
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=False)
                optimizer.step()
                optimizer.zero_grad()
            found.append(pz.whole_state_dict(model))
        for key, value in found[0].items():
            torch.testing.assert_close(found[1][key], value, rtol=1e-11, atol=1e-13)

    run_ranks(worker, 4)
