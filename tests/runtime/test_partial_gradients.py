"""Gradients that lie partial, in every way that they can, against the whole ones; and how many all-reduces they take."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

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
        expected = [whole(4), whole(2, 3), whole(7), whole(3), whole(SMALL // 8 + 1), whole(4), whole(6)]
        placed = [
            with_gradient(
                expected[0], mesh, Replicate(), Partial()
            ),  # summed with the next but one, and with `split`
            with_gradient(expected[1], mesh, Partial(), Partial()),  # alone over two axes
            with_gradient(expected[2], mesh, Replicate(), Partial()),
            with_gradient(expected[3], mesh["tp"], Partial()),  # another mesh
            with_gradient(expected[4], mesh, Replicate(), Partial()),  # large: alone
            with_gradient(expected[5], mesh, Replicate(), Replicate()),
            with_gradient(expected[6], None),
        ]
        sent: list[int] = []
        reduce = dist.all_reduce
        with patch.object(dist, "all_reduce", lambda t, **k: (sent.append(t.numel()), reduce(t, **k))):
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
        # The groups of (dp_shard, tp) in the order of their first member; the large one goes through DTensor.
        assert sent == [4 + 7 + 3 * rows, 6, 6, 3]


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
