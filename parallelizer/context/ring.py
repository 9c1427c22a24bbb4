"""Keys and values pass from rank to rank in a ring, each block being used while the next one is on its way.

No rank ever holds more than two ranks' keys and values. In head-tail order, under a causal mask, what a rank has to do
with another's block is always half of it: of an earlier rank's keys its own rows see the head, and a later rank's
keys are seen by its own tail. So all ranks work alike at every step (zigzag, as in Striped and Zigzag Ring Attention;
Brandon et al., 2023, and the ring-flash-attention project). Gradients do not travel around: each rank sends what it
has found for a block straight to the rank that the block belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from parallelizer.context.gathering import refuse_second_order
from parallelizer.context.kernels import accumulation_dtype, block_backward, block_forward, merge

Tensor = torch.Tensor


class RingAttention(torch.autograd.Function):
    """As `attention.context_attention`, on checked arguments and more than one rank."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, is_causal: bool, scale: float
    ) -> Tensor:
        rank = dist.get_rank(group)
        wide = accumulation_dtype(q.dtype)
        passed = _passed_on(k, v, group)
        _, keys, values = next(passed)  # one's own
        out, lse = block_forward(q, keys, values, is_causal=is_causal, scale=scale)
        out, lse = out.to(wide), lse.contiguous()
        for source, keys, values in passed:
            rows, columns = seen(rank, source, q.size(2), k.size(2), is_causal=is_causal)
            part, part_lse = block_forward(
                _take(q, rows), _take(keys, columns), _take(values, columns), is_causal=False, scale=scale
            )
            merged, merged_lse = merge(_take(out, rows), _take(lse, rows), part, part_lse)
            _take(out, rows).copy_(merged)
            _take(lse, rows).copy_(merged_lse)
        result = out.to(q.dtype)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        # Under a shape that no attention of torch's saves: see `gathering`.
        ctx.save_for_backward(q, k, v, result, lse.unsqueeze(0))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        (grad_out,) = gradients
        q, k, v, out, lse = ctx.saved_tensors
        group, lse = ctx.group, lse.squeeze(0)
        rank, wide = dist.get_rank(group), accumulation_dtype(q.dtype)
        grad_q = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
        grad_k, grad_v = (
            torch.zeros_like(t, dtype=wide, memory_format=torch.contiguous_format) for t in (k, v)
        )
        for source, keys, values in _passed_on(k, v, group):
            rows, columns = seen(rank, source, q.size(2), k.size(2), is_causal=ctx.is_causal)
            part_q, part_k, part_v = block_backward(
                _take(grad_out, rows), _take(q, rows), _take(keys, columns), _take(values, columns),
                _take(out, rows), _take(lse, rows),
                is_causal=ctx.is_causal and source == rank, scale=ctx.scale,
            )  # fmt: skip
            _take(grad_q, rows).add_(part_q)
            if source != rank:
                part_k, part_v, columns = _exchanged(part_k, part_v, source, k.size(2), group, ctx.is_causal)
            _take(grad_k, columns).add_(part_k)
            _take(grad_v, columns).add_(part_v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def seen(rank: int, source: int, rows: int, keys: int, *, is_causal: bool) -> tuple[slice, slice]:
    """Which of its rows `rank` needs for the block of `source`, and which rows of that block they see."""
    if not is_causal or source == rank:
        return slice(0, rows), slice(0, keys)
    return (
        (slice(0, rows), slice(0, keys // 2)) if source < rank else (slice(rows // 2, rows), slice(0, keys))
    )


def _passed_on(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every rank's keys and values in turn, beginning with one's own; the next are on their way while these are used."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    here = torch.cat([k.flatten(), v.flatten()])
    for step in range(ranks):
        ahead = torch.empty_like(here)
        works = (
            _exchange(here, (rank + 1) % ranks, ahead, (rank - 1) % ranks, group) if step < ranks - 1 else []
        )
        keys, values = here.split([k.numel(), v.numel()])
        yield (rank - step) % ranks, keys.view(k.shape), values.view(v.shape)
        for work in works:
            work.wait()
        here = ahead


def _exchanged(
    grad_k: Tensor, grad_v: Tensor, owner: int, keys: int, group: dist.ProcessGroup, is_causal: bool
) -> tuple[Tensor, Tensor, slice]:
    """Send the gradients of a block to the rank that it belongs to, and get those of one's own from the rank that had
    it at this step: with which rows of it they are.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    other = (2 * rank - owner) % ranks  # as many steps behind as the owner is ahead
    _, columns = seen(other, rank, keys, keys, is_causal=is_causal)
    rows = columns.stop - columns.start
    sizes = [(*g.shape[:2], rows, g.size(3)) for g in (grad_k, grad_v)]
    sent = torch.cat([grad_k.flatten(), grad_v.flatten()])
    counts = [torch.Size(size).numel() for size in sizes]
    received = sent.new_empty(sum(counts))
    for work in _exchange(sent, owner, received, other, group):
        work.wait()
    first, second = (piece.view(size) for piece, size in zip(received.split(counts), sizes, strict=True))
    return first, second, columns


def _exchange(sent: Tensor, to: int, received: Tensor, come_from: int, group: dist.ProcessGroup) -> list[Any]:
    works: list[Any] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, dist.get_global_rank(group, to), group=group),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(group, come_from), group=group),
        ]
    )
    return works


def _take(tensor: Tensor, rows: slice) -> Tensor:
    return tensor.narrow(2, rows.start, rows.stop - rows.start)
