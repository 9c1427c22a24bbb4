"""Gradients that lie partial, in every way that they can, against the whole ones; and how many all-reduces they take."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from parallelizer.runtime.partial_gradients import SMALL, sum_partial
from tests.ranks import run_ranks
from tests.runtime.test_gradients import with_gradient


@pytest.mark.ranks
def test_small_gradients_of_one_mesh_and_axes_are_summed_by_one_all_reduce_for_each_axis() -> None:
    def worker() -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        draw = torch.Generator().manual_seed(0)

        def whole(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

        split = nn.Parameter(distribute_tensor(torch.zeros(5, 3).double(), mesh, [Shard(0), Replicate()]))
        of_split = whole(5, 3)
        held = distribute_tensor(of_split, mesh, [Shard(0), Replicate()]).to_local()
        half = DTensor.from_local(
            held * (1 + mesh.get_local_rank("tp")) / 3,
            mesh,
            [Shard(0), Partial()],
            run_check=False,
            shape=split.shape,
            stride=split.stride(),
        )
        split.grad = half
        over_tp, over_both = (Replicate(), Partial()), (Partial(), Partial())
        kinds: list[tuple[tuple[int, ...], DeviceMesh | None, tuple[Placement, ...]]] = [
            ((4,), mesh, over_tp),  # with two others over tp, `split` among them
            ((2, 3), mesh, over_both),  # with one other over both
            ((7,), mesh, over_tp),
            ((3,), mesh["tp"], (Partial(),)),  # the only one of its mesh
            ((2,), mesh, over_both),
            ((SMALL // 8 + 1,), mesh, over_tp),  # large
            ((4,), mesh, (Replicate(), Replicate())),
            ((6,), None, ()),
        ]
        expected = [whole(*shape) for shape, _, _ in kinds]
        placed = [with_gradient(e, on, *lies) for e, (_, on, lies) in zip(expected, kinds, strict=True)]
        sent: list[int] = []
        reduce = dist.all_reduce

        def counted(tensor: Tensor, group: dist.ProcessGroup) -> None:
            sent.append(tensor.numel())
            reduce(tensor, group=group)

        with patch.object(dist, "all_reduce", counted):
            sum_partial([*placed, split, nn.Parameter(torch.ones(1))])
        for param, value in zip([*placed, split], [*expected, of_split], strict=True):
            gradient = param.grad
            assert gradient is not None
            if isinstance(param, DTensor):
                assert isinstance(gradient, DTensor)
                assert (gradient.placements, gradient.shape) == (param.placements, param.shape)
            else:
                assert gradient.shape == param.shape
            plain = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(plain, value, rtol=1e-12, atol=1e-12)
        kept = [p.grad for p in placed]
        sum_partial(placed)
        assert all(p.grad is before for p, before in zip(placed, kept, strict=True))  # nothing to do
        return sent

    for rank, sent in enumerate(run_ranks(worker, 4)):
        rows = 3 if rank < 2 else 2  # of `split`
        # In the order of the first of each kind; DTensor sums what comes alone.
        assert sent == [4 + 7 + 3 * rows, 6 + 2, 6 + 2]


@pytest.mark.ranks
def test_a_partial_gradient_of_a_sharded_parameter_is_scattered() -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        value = torch.arange(6.0).reshape(2, 3)
        param = nn.Parameter(distribute_tensor(torch.zeros(2, 3), mesh, [Shard(0)]))
        part = DTensor.from_local(
            value * (1 + mesh.get_local_rank("tp")) / 3, mesh, [Partial()], run_check=False
        )
        with torch.no_grad():
            param.grad = part
        sum_partial([param])
        assert isinstance(param.grad, DTensor) and param.grad.placements == (Shard(0),)
        torch.testing.assert_close(param.grad.full_tensor(), value)

    run_ranks(worker, 2)
