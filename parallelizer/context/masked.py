"""Attention under a mask of one's own: this rank's rows of it, against the columns of the whole sequence.

What runs is torch's own attention on whole keys, so that every mask is exact: boolean or added, of one row for all or of
every row, of one head or of each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallelizer.context.gathering import gather, refuse_second_order, scatter_sum
from parallelizer.context.kernels import no_autocast
from parallelizer.context.sequence import GatherSequence

Tensor = torch.Tensor


def check(mask: Tensor, q: Tensor, k: Tensor, ranks: int) -> None:
    """Raises ValueError for a mask that has not this rank's rows and the whole sequence's columns."""
    rows, keys, whole = q.size(2), k.size(2), k.size(2) * ranks
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() < 2 or mask.dim() > 4:
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} is not [batch, heads, rows, columns]")
    if ranks > 1 and shape[3] == keys > 1:
        raise ValueError(
            f"attn_mask has {keys} columns, the rows of one rank: it was made from a local length, and the sequence "
            f"has {whole}"
        )
    if shape[3] not in (1, whole):
        raise ValueError(f"attn_mask has {shape[3]} columns, and the sequence {whole}")
    if shape[2] not in (1, rows):
        every = shape[2] == rows * ranks
        hint = " (all rows; list it among the batch's buffers, which are split)" if every else ""
        raise ValueError(f"attn_mask has {shape[2]} rows{hint}, and this rank {rows}")
    if shape[1] not in (1, q.size(1)) or shape[0] not in (1, q.size(0)):
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not fit queries of {tuple(q.shape)}")


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """torch's attention, with grouped heads."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    with no_autocast(q.device.type):
        # The operator and not the function, which whoever looks for calls of a model's own would take for one.
        out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
            q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
    return out


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, group: dist.ProcessGroup, scale: float
) -> Tensor:
    """Local rows against gathered keys, which are kept for backward."""
    keys, values = _Gather.apply(group, k, v)
    return attend(q, keys, values, mask=mask, is_causal=False, scale=scale)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.group = group
        return gather(k, v, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_order()
        grad_keys, grad_values = gradients
        return None, *scatter_sum(grad_keys, grad_values, grad_keys.dtype, ctx.group)


def of_heads(mask: Tensor, local_rows: int, group: dist.ProcessGroup) -> Tensor:
    """The mask of all rows, for this rank's heads."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if mask.size(2) == local_rows and local_rows > 1:
        mask = GatherSequence.apply(mask, 2, group)
    return mask.chunk(ranks, dim=1)[rank] if mask.size(1) > 1 else mask
