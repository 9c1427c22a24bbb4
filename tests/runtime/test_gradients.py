"""The norm of gradients that lie in every possible way, against the norm of the whole ones in float64;
clipping by it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from parallelizer.runtime.gradients import clip_factor, clip_grad_norm_, grad_norm, scale_
from tests.ranks import run_ranks

SHAPES = [(8, 4), (5, 3), (7,), (1,), (3, 8), (6, 6), (2, 2)]


def wholes(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 3**i
        for i, shape in enumerate(SHAPES)
    ]


def with_gradient(whole: Tensor, mesh: DeviceMesh | None, *placements: Placement) -> nn.Parameter:
    """A parameter and its gradient, both placed; a partial gradient has a different part on every rank."""
    if mesh is None:
        param = nn.Parameter(torch.zeros_like(whole))
        param.grad = whole.clone()
        return param
    lies = [Replicate() if isinstance(p, Partial) else p for p in placements]
    param = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, lies))
    param.grad = distribute_tensor(whole.clone(), mesh, lies)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            size, rank = mesh.size(axis), mesh.get_local_rank(axis)
            part = param.grad.to_local() * (rank + 1) / (size * (size + 1) / 2)
            param.grad = DTensor.from_local(part, mesh, placements, run_check=False)
    return param


def every_kind(dtype: torch.dtype) -> list[nn.Parameter]:
    """Two meshes with shared axes, a third of another root, plain tensors, uneven and empty shards, frozen
    parameters.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    a, b, c, d, e, f, g = wholes(dtype)
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    return [
        with_gradient(a, mesh, Shard(0), Shard(1)),
        with_gradient(b, mesh["tp"], Shard(0)),
        with_gradient(c, mesh["dp_shard"], Replicate()),
        with_gradient(d, other, Shard(0)),  # empty on all ranks but one
        with_gradient(e, None),
        with_gradient(f, mesh["tp"], Partial()),
        with_gradient(g, mesh, Shard(1), Partial()),
        frozen,
    ]


@pytest.mark.ranks
def test_norms_and_clipping_on_four_ranks() -> None:
    def worker() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for dtype, exact in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            params = every_kind(dtype)
            whole = wholes(dtype)
            expected = torch.cat([w.double().flatten() for w in whole]).norm()
            norm = clip_grad_norm_(params, 5.0)
            found[f"{dtype} norm"] = norm
            assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(norm.double(), expected, rtol=exact, atol=0)
            for param, full in zip(params, whole, strict=False):
                gradient = param.grad
                assert gradient is not None
                if isinstance(gradient, DTensor) and isinstance(param, DTensor):
                    assert gradient.placements == param.placements
                    gradient = gradient.full_tensor()
                torch.testing.assert_close(
                    gradient.double(), full.double() * (5 / expected), rtol=4 * exact, atol=1e-6
                )
        return found

    results = run_ranks(worker, 4)
    assert all(torch.equal(r[k], results[0][k]) for r in results for k in results[0])


@pytest.mark.ranks
def test_a_gradient_that_is_missing_on_one_rank_stops_nobody() -> None:
    def worker() -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        used, unused = (
            with_gradient(torch.full((4,), 2.0), None),
            with_gradient(torch.full((4,), 2.0), mesh, Shard(0)),
        )
        if dist.get_rank() == 0:
            unused.grad = None
        return grad_norm([unused, used])

    # All of the one and half of the other.
    assert [n.item() for n in run_ranks(worker, 2)] == [pytest.approx((4 * 4 + 2 * 4) ** 0.5)] * 2


# One process


def test_the_norm_of_nothing_is_zero() -> None:
    assert grad_norm([]) == 0
    assert grad_norm([nn.Parameter(torch.ones(2))]) == 0
    assert grad_norm([with_gradient(torch.zeros(3), None)]) == 0


def test_sixteen_bit_gradients_are_added_up_in_float32() -> None:
    # In float16 the squares overflow, in bfloat16 the norm of each would be rounded to 8 bits.
    assert grad_norm([with_gradient(torch.full((10,), 3e4, dtype=torch.float16), None)]) == pytest.approx(
        3e4 * 10**0.5, rel=1e-6
    )
    one = torch.cat([torch.ones(1000), torch.full((1,), 2.0)]).bfloat16()
    assert grad_norm([with_gradient(one, None)]).item() == pytest.approx(1004**0.5, rel=1e-6)


@pytest.mark.parametrize(("max_norm", "norm"), [(1.0, 5.0), (5.0, 5.0), (100.0, 5.0), (1.0, 0.0)])
def test_the_factor_is_torchs(max_norm: float, norm: float) -> None:
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([param], max_norm)
    assert clip_factor(torch.tensor(norm, dtype=torch.float64), max_norm) * norm == pytest.approx(
        param.grad.item(), rel=1e-12
    )


def test_scaling_changes_gradients_in_place_and_keeps_their_dtype() -> None:
    params = [
        with_gradient(torch.ones(2, dtype=d), None) for d in (torch.float32, torch.bfloat16, torch.float64)
    ]
    before = [p.grad for p in params]
    scale_([*params, nn.Parameter(torch.ones(1))], torch.tensor(0.5))
    assert all(p.grad is g for p, g in zip(params, before, strict=True))
    assert all(
        p.grad is not None and p.grad.dtype == p.dtype and p.grad.tolist() == [0.5, 0.5] for p in params
    )


def _norm_on_equal_meshes() -> tuple[float, int]:
    """The norm of gradients on two equal meshes, whose groups have other names, and the all-reduces that it took."""
    first, second = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")) for _ in "ab"
    )
    assert first == second
    parameters = []
    for mesh in (first, second):
        param = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate(), Shard(0)]))
        param.grad = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Replicate(), Shard(0)])
        parameters.append(param)
    counted = []
    right = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *args, **kwargs: counted.append(right(*args, **kwargs)))
        norm = grad_norm(parameters).item()
    names = {mesh.get_group("dp_shard").group_name for mesh in (first, second)}
    return norm, len(counted) if len(names) == 2 else 0


@pytest.mark.ranks
def test_equal_meshes_of_one_process_are_one() -> None:
    for norm, collectives in run_ranks(_norm_on_equal_meshes, 4):
        assert norm == pytest.approx(50**0.5) and collectives == 1
