"""Whole sequences to local rows and back, with gradients, over the context-parallel axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallelizer.context import balance
from parallelizer.plan import Flow


def relay(tensor: torch.Tensor, flow: Flow, group: dist.ProcessGroup) -> torch.Tensor:
    """Lay a tensor out as `flow` says: split a whole one where it wants a shard, gather a split one where it
    arrives as one.
    """
    if flow.wanted is not None and flow.wanted.dim is not None:
        # Rows of other ranks get a zero gradient here, and the sum over the data axes makes it whole.
        return balance.split(tensor, flow.wanted.dim, dist.get_world_size(group), dist.get_rank(group))
    if flow.arrives is None or flow.arrives.dim is None:
        raise ValueError(f"`{flow}` neither splits nor gathers")
    gathered: torch.Tensor = GatherSequence.apply(tensor, flow.arrives.dim, group)
    return gathered


class GatherSequence(torch.autograd.Function):
    """All ranks' rows in their original order; in backward, the sum of all ranks' gradients of this rank's
    rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_sequence(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        ranks = dist.get_world_size(ctx.group)
        order = balance.head_tail(gradient.size(ctx.dim), ranks).to(gradient.device)
        sent = torch.stack(gradient.index_select(ctx.dim, order).chunk(ranks, ctx.dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received.sum(0), None, None


def gather_sequence(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole tensor from every rank's rows along `dim`, in the original order. No gradient."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return tensor
    local = tensor.contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(parts, local, group=group)
    return balance.unsplit_parts(parts, dim)
