"""Inputs of modules gathered in float8: each rank casts what it has, and the bytes travel.

The scale is that of the whole tensor, so that the linears behind take the values that they would have cast themselves. They
share one tensor in float8, and keep it for backward. Gradients come back in their own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from parallelizer.styles.float8.linear import computes_in_float8
from parallelizer.styles.float8.torchao_private import bytes_of, cast_input, with_bytes


def gather_input_in_float8(module: nn.Module, tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A tensor laid out anew in float8, for the linears in float8 in a module, which are of the recipe tensorwise. Collective."""
    linear = next(m for m in module.modules() if computes_in_float8(m))
    gathered: DTensor = BytesMoved.apply(cast_input(tensor, linear), placements)
    return gathered


class BytesMoved(torch.autograd.Function):
    """A redistribution of a DTensor in float8, as bytes, since gloo knows no float8. Gradients are redistributed as they are."""

    @staticmethod
    def forward(ctx: Any, low: DTensor, placements: Sequence[Placement]) -> DTensor:
        ctx.mesh, ctx.placements = low.device_mesh, low.placements
        part, shape, stride = low.to_local(), low.shape, low.stride()
        parts = DTensor.from_local(
            bytes_of(part), low.device_mesh, low.placements, run_check=False, shape=shape, stride=stride
        )
        whole = with_bytes(part, parts.redistribute(placements=placements).to_local())
        return DTensor.from_local(
            whole, low.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return gradient.redistribute(placements=ctx.placements), None
