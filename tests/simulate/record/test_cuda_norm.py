"""RMSNorm as CUDA computes it, in a dry run: what it keeps for backward, and what its gradients look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallelizer.simulate.record.cuda_operators import CudaOperators
from tests.ranks import run_ranks

HALF = torch.bfloat16


def local(tensor: Any) -> Tensor:
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held


def kept(x: Tensor, weight: Tensor) -> tuple[Tensor, list[tuple[tuple[int, ...], torch.dtype]]]:
    """A norm for CUDA, and the shape and dtype of what this rank keeps for backward."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(local(tensor))
        return tensor

    with CudaOperators(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = F.rms_norm(x, weight.shape, weight, 1e-5)
    return out, [(tuple(t.shape), t.dtype) for t in saved]


def test_a_norm_in_16_bits_keeps_its_input_its_weight_and_a_number_for_each_row() -> None:
    x, weight = (torch.randn(*size, dtype=HALF, requires_grad=True) for size in ((2, 6, 16), (16,)))
    out, saved = kept(x, weight)
    assert saved == [((2, 6, 16), HALF), ((16,), HALF), ((2, 6, 1), torch.float32)]
    out.sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert out.dtype == x.grad.dtype == weight.grad.dtype == HALF


@pytest.mark.ranks
def test_on_dtensors_a_rank_keeps_its_part_and_gradients_lie_as_torchs() -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def tensors() -> list[Any]:
            wholes = torch.ones(2, 6, 16, dtype=HALF), torch.ones(16, dtype=HALF)
            ways = Shard(1), Replicate()
            return [
                distribute_tensor(t, mesh, [way]).requires_grad_()
                for t, way in zip(wholes, ways, strict=True)
            ]

        def looks(out: Any, x: Any, weight: Any) -> list[Any]:
            return [(t.placements, t.shape, t.dtype, local(t).shape) for t in (out, x.grad, weight.grad)]

        x, weight = tensors()
        out, saved = kept(x, weight)
        assert saved == [((2, 3, 16), HALF), ((16,), HALF), ((2, 3, 1), torch.float32)]
        theirs, their_weight = tensors()
        right: Any = F.rms_norm(theirs, (16,), their_weight, 1e-5)
        for one in (out, right):
            one.sum().backward()  # the gradient of a sum lies whole on each rank
        assert looks(out, x, weight) == looks(right, theirs, their_weight)

    run_ranks(worker, 2)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_norm_of_two_dtypes_is_torchs() -> None:
    x, weight = torch.randn(2, 6, 16, dtype=HALF), torch.randn(16)
    with CudaOperators():
        out = F.rms_norm(x, (16,), weight, 1e-5)
        stood_in_for = F.rms_norm(x, (16,), weight.to(HALF), 1e-5)
    right = F.rms_norm(x, (16,), weight, 1e-5)
    assert torch.equal(out, right)
    assert not torch.equal(stood_in_for, right)  # values of one kernel mean nothing
