"""The method all-gather: gathers keys and values of all ranks; every rank then computes the blocks of its
rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelizer.styles.context_parallel.balance import Block
from parallelizer.styles.context_parallel.kernels import (
    accumulation_dtype,
    block_backward,
    block_forward,
    merge,
)
from parallelizer.styles.context_parallel.order import Order

Tensor = torch.Tensor


class GatheredAttention(torch.autograd.Function):
    """As `attention.context_attention`, on checked arguments. `plan` are this rank's blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup,
        order: Order,
        plan: tuple[Block, ...],
        scale: float,
        keep_gathered: bool,
    ) -> Tensor:
        keys, values = gather(k, v, group, order)
        out, lse = forward_blocks(q, keys, values, plan, scale)
        ctx.group, ctx.order, ctx.plan, ctx.scale, ctx.gathered = group, order, plan, scale, keep_gathered
        # lse is saved under a shape that no attention of torch's saves: if a checkpoint recomputes this call
        # by plain attention, it sees other tensors than it saved and raises, instead of going on with another
        # gradient.
        ctx.save_for_backward(q, *((keys, values) if keep_gathered else (k, v)), out, lse.unsqueeze(0))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        q, k, v, out, lse = ctx.saved_tensors
        keys, values = (k, v) if ctx.gathered else gather(k, v, ctx.group, ctx.order)
        grad_q, grad_keys, grad_values = backward_blocks(
            grad_out, q, keys, values, out, lse.squeeze(0), ctx.plan, ctx.scale
        )
        # Skipped only if neither is wanted, which holds on all ranks or on none.
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return grad_q, None, None, None, None, None, None, None
        grad_k, grad_v = scatter_sum(grad_keys, grad_values, k.dtype, ctx.group, ctx.order)
        return grad_q, grad_k, grad_v, None, None, None, None, None


def refuse_second_order() -> None:
    """Raises RuntimeError in a backward that is itself recorded: nothing here can be differentiated again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("context_attention can be differentiated once: call backward without create_graph")


def forward_blocks(
    q: Tensor, keys: Tensor, values: Tensor, plan: Sequence[Block], scale: float
) -> tuple[Tensor, Tensor]:
    """The attention of local rows q over the whole keys and values: out in q's dtype, lse as kernels give
    it."""
    by_rows = []
    for _, same_rows in itertools.groupby(plan, key=lambda b: (b.queries.start, b.queries.stop)):
        parts = [
            block_forward(
                _take(q, b.queries),
                _take(keys, b.keys),
                _take(values, b.keys),
                is_causal=b.is_causal,
                scale=scale,
            )
            for b in same_rows
        ]
        by_rows.append(functools.reduce(lambda a, b: merge(*a, *b), parts))
    if len(by_rows) == 1:
        out, lse = by_rows[0]
    else:
        out, lse = (torch.cat(pieces, dim=2) for pieces in zip(*by_rows, strict=True))
    return out.to(q.dtype), lse


def backward_blocks(
    grad_out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Sequence[Block],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the local rows q, in q's dtype, and of the whole keys and values through those rows.

    The latter are sums over blocks in the accumulation dtype, but for a plan of one block of all keys, which has
    nothing to sum.
    """
    (b, *others) = plan
    if not others and b.keys == slice(0, keys.size(2)):
        return block_backward(grad_out, q, keys, values, out, lse, is_causal=b.is_causal, scale=scale)
    wide = accumulation_dtype(q.dtype)
    sums = [torch.zeros_like(t, dtype=wide, memory_format=torch.contiguous_format) for t in (q, keys, values)]
    for b in plan:
        grad_rows, q_rows, out_rows, lse_rows = (_take(t, b.queries) for t in (grad_out, q, out, lse))
        k_block, v_block = _take(keys, b.keys), _take(values, b.keys)
        grads = block_backward(
            grad_rows, q_rows, k_block, v_block, out_rows, lse_rows, is_causal=b.is_causal, scale=scale
        )
        for total, grad, where in zip(sums, grads, (b.queries, b.keys, b.keys), strict=True):
            _take(total, where).add_(grad)
    grad_q, grad_keys, grad_values = sums
    return grad_q.to(q.dtype), grad_keys, grad_values


def gather(k: Tensor, v: Tensor, group: dist.ProcessGroup, order: Order) -> tuple[Tensor, Tensor]:
    """The keys and values of the whole sequence, in its original order, with its padding; for one rank k and v themselves.

    One collective for both.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return k, v
    local = torch.cat([k.flatten(), v.flatten()])
    buffer = local.new_empty(ranks * local.numel())
    _all_gather(buffer, local, group)
    parts = [row.split([k.numel(), v.numel()]) for row in buffer.view(ranks, -1).unbind()]
    keys = order.join([part[0].view(k.shape) for part in parts], 2)
    values = order.join([part[1].view(v.shape) for part in parts], 2)
    return keys, values


def scatter_sum(
    grad_keys: Tensor, grad_values: Tensor, dtype: torch.dtype, group: dist.ProcessGroup, order: Order
) -> tuple[Tensor, Tensor]:
    """Sends every rank its rows of the gradients of the whole keys and values, and adds up what arrives.

    They travel in `dtype` and are added in its accumulation dtype, in rank order: an all-to-all moves the
    bytes of a reduce-scatter, whose sum would be made in `dtype`, and in whatever order the backend likes.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return grad_keys, grad_values
    grads = (grad_keys, grad_values)
    shapes = [(*g.shape[:2], g.size(2) // ranks, g.size(3)) for g in grads]
    sizes = [g.numel() // ranks for g in grads]
    sent = grad_keys.new_empty(ranks, sum(sizes), dtype=dtype)
    for rank, row in enumerate(sent.unbind()):
        for grad, shape, piece in zip(grads, shapes, row.split(sizes), strict=True):
            order.split_into(piece.view(shape), grad, 2, rank)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    total = received.sum(dim=0, dtype=accumulation_dtype(dtype)).to(dtype)
    grad_k, grad_v = (piece.view(shape) for piece, shape in zip(total.split(sizes), shapes, strict=True))
    return grad_k, grad_v


def _take(tensor: Tensor, rows: slice) -> Tensor:
    # Not by indexing, which asks for a real device, so that a CUDA run can be traced where there is none.
    return tensor.narrow(2, rows.start, rows.stop - rows.start)


def _all_gather(buffer: Tensor, local: Tensor, group: dist.ProcessGroup) -> None:
    # torch 2.13 renamed this collective, and warns at the old name.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(buffer, local, group=group)
