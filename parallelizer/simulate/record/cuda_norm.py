"""RMSNorm as a step on CUDA computes it, in a step that is followed on fake tensors of the CPU.

CUDA has one kernel for `F.rms_norm`, which reads any dtype, and keeps the reciprocal of the root mean square of each row, in
float32. The CPU computes it from single operators, in float32, which keep three tensors of the size of the input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """A tensor of the right shape and placements whose values mean nothing. What CUDA computes from single operators, too, is
    left to torch: two dtypes, several dimensions, and what DTensor redistributes.
    """
    one_kernel = (
        weight is not None
        and weight.dtype == input.dtype
        and input.dtype in FLOATS
        and len(normalized_shape) == 1
        and _rows_are_whole(input, weight)
    )
    if not one_kernel:
        return F.rms_norm(input, normalized_shape, weight, eps)
    normed: torch.Tensor = _OneKernel.apply(input, weight)
    return normed


def _rows_are_whole(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if isinstance(weight, DTensor) and not all(p.is_replicate() for p in weight.placements):
        return False
    return not isinstance(x, DTensor) or not any(
        p.is_partial() or p.is_shard(x.ndim - 1) for p in x.placements
    )


class _OneKernel(torch.autograd.Function):
    """Operators that read, write and keep what the kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        reciprocals = x[..., :1].to(torch.float32, copy=True)
        ctx.save_for_backward(x, weight, reciprocals)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _, _ = ctx.saved_tensors
        product = gradients[0] * x  # it lies as x does, so that the sum lies as CUDA's gradient of the weight
        return product, product.sum(tuple(range(x.ndim - 1)))
