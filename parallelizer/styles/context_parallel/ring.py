"""The method ring: keys and values pass from rank to rank; each rank uses one block while the next one is
sent.

No rank ever holds more than two ranks' keys and values. In head-tail order, under a causal mask, a rank
computes exactly half of another rank's block: its own rows see the head of an earlier rank's keys, and its
own tail sees a later rank's keys. So all ranks have equal work at every step (zigzag, as in Striped and
Zigzag Ring Attention; Brandon et al., 2023, and the ring-flash-attention project). Gradients do not pass
around the ring: each rank sends its gradient of a block directly to the rank that owns the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallelizer.styles.context_parallel.gathering import refuse_second_order
from parallelizer.styles.context_parallel.kernels import (
    accumulation_dtype,
    block_backward,
    block_forward,
    merge,
)
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.part import SequencePart

Tensor = torch.Tensor


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, those of `part`, over which `order` deals the sequence out, and what their attention is like. A mask
    [B or 1, H or 1, rows or 1, P] has a column for every row of the padded sequence, and no gradient.
    """

    part: SequencePart
    order: Order
    is_causal: bool
    scale: float
    mask: Tensor | None = None


class RingAttention(torch.autograd.Function):
    """As `attention.context_attention`, on checked arguments and more than one rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        result, lse = ring_forward(q, k, v, ring)
        ctx.ring = ring
        # Under a shape that no attention of torch's saves: see `gathering`.
        ctx.save_for_backward(q, k, v, result, lse.unsqueeze(0))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        (grad_out,) = gradients
        q, k, v, out, lse = ctx.saved_tensors
        return *ring_backward(grad_out, q, k, v, out, lse.squeeze(0), ctx.ring), None


def ring_forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """The attention of this rank's rows, in q's dtype, and its log-sum-exp [B, H, rows], in the accumulation dtype."""
    pairs = _Pairs(ring, q.size(2), k.size(2))
    passed = _passed_on(k, v, ring.part)
    source, keys, values = next(passed)  # one's own
    out, lse = pairs.forward(q, keys, values, source, pairs.own())
    out, lse = out.to(accumulation_dtype(q.dtype)), lse.contiguous()
    for source, keys, values in passed:
        seen = pairs.seen(source)
        if seen is None:
            continue
        out_part, lse_part = pairs.forward(q, keys, values, source, seen)
        rows, _ = seen
        merged, merged_lse = merge(_take(out, rows), _take(lse, rows), out_part, lse_part)
        _take(out, rows).copy_(merged)
        _take(lse, rows).copy_(merged_lse)
    return out.to(q.dtype), lse


def ring_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from what `ring_forward` returned."""
    pairs = _Pairs(ring, q.size(2), k.size(2))
    rank, wide = ring.part.rank, accumulation_dtype(q.dtype)
    grad_q, grad_k, grad_v = (
        torch.zeros_like(t, dtype=wide, memory_format=torch.contiguous_format) for t in (q, k, v)
    )

    def add(own: slice, shares: Iterable[Tensor]) -> None:
        for total, share in zip((grad_k, grad_v), shares, strict=True):
            _take(total, own).add_(share)

    # The gradients of a block travel while those of the next one are computed.
    arriving: _Arriving | None = None
    for source, keys, values in _passed_on(k, v, ring.part):
        found: tuple[Tensor, ...] = ()
        seen = pairs.own() if source == rank else pairs.seen(source)
        if seen is not None:
            rows, columns = seen
            part_q, *found_here = block_backward(
                _take(grad_out, rows), _take(q, rows), _take(keys, columns), _take(values, columns),
                _take(out, rows), _take(lse, rows), is_causal=ring.is_causal and source == rank,
                scale=ring.scale, mask=pairs.mask(source, columns),
            )  # fmt: skip
            found = tuple(found_here)
            _take(grad_q, rows).add_(part_q)
        if arriving is not None:
            arriving.add_with(add)
            arriving = None
        if source != rank:
            arriving = _exchanged(found, k, v, source, pairs)
        elif seen is not None:
            add(seen[1], found)
    if arriving is not None:
        arriving.add_with(add)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


@dataclass(frozen=True)
class _Pairs:
    """What rows of one rank have to do with the keys of another."""

    ring: Ring
    rows: int
    keys: int

    def own(self) -> tuple[slice, slice]:
        """All rows, and which of the rank's own keys they see."""
        ring = self.ring
        all_keys = ring.is_causal or ring.mask is not None
        keys = self.keys if all_keys else ring.order.real(ring.part.rank, self.keys)
        return slice(0, self.rows), slice(0, keys)

    def seen(self, source: int, rank: int | None = None) -> tuple[slice, slice] | None:
        """Which of its rows a rank (this one) needs for the keys of `source`, and which of those they see."""
        if self.ring.mask is not None:
            return slice(0, self.rows), slice(0, self.keys)
        rank = self.ring.part.rank if rank is None else rank
        return self.ring.order.seen(rank, source, self.rows, self.keys, is_causal=self.ring.is_causal)

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, source: int, seen: tuple[slice, slice]
    ) -> tuple[Tensor, Tensor]:
        """Attention of the rows over what they see of the keys of `source`, and its log-sum-exp."""
        rows, columns = seen
        return block_forward(
            _take(q, rows), _take(keys, columns), _take(values, columns),
            is_causal=self.ring.is_causal and source == self.ring.part.rank,
            scale=self.ring.scale, mask=self.mask(source, columns),
        )  # fmt: skip

    def mask(self, source: int, columns: slice) -> Tensor | None:
        """The mask's columns for the keys of `source`."""
        if self.ring.mask is None:
            return None
        whole = self.ring.order.split(self.ring.mask, 3, source)
        return whole.narrow(3, columns.start, columns.stop - columns.start)


def _passed_on(k: Tensor, v: Tensor, part: SequencePart) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every rank's keys and values in turn, beginning with one's own; the next are on their way while these are used."""
    rank, ranks = part.rank, part.ranks
    here = torch.cat([k.flatten(), v.flatten()])
    for step in range(ranks):
        ahead = torch.empty_like(here)
        works = (
            _exchange(here, (rank + 1) % ranks, ahead, (rank - 1) % ranks, part) if step < ranks - 1 else []
        )
        keys, values = here.split([k.numel(), v.numel()])
        yield (rank - step) % ranks, keys.view(k.shape), values.view(v.shape)
        for work in works:
            work.wait()
        here = ahead


@dataclass
class _Arriving:
    """Gradients of a block on their way: `sent` to the rank that the block belongs to, and this rank's own, `received` from the
    rank that had it, with the `rows` that they are of; neither must exist.
    """

    works: list[Any]
    sent: Tensor | None
    received: Tensor | None
    sizes: list[torch.Size]
    rows: slice

    def add_with(self, add: Callable[[slice, Iterable[Tensor]], None]) -> None:
        """Wait for them, and add what was received."""
        for work in self.works:
            work.wait()
        if self.received is not None:
            pieces = self.received.split([size.numel() for size in self.sizes])
            add(self.rows, [piece.view(size) for piece, size in zip(pieces, self.sizes, strict=True)])


def _exchanged(found: tuple[Tensor, ...], k: Tensor, v: Tensor, owner: int, pairs: _Pairs) -> _Arriving:
    """Begin to send the gradients of a block to the rank that it belongs to, and to receive this rank's own from the rank that
    had it at this step.
    """
    part = pairs.ring.part
    rank, ranks = part.rank, part.ranks
    other = (2 * rank - owner) % ranks  # as many steps behind as the owner is ahead
    seen = pairs.seen(rank, other)
    sent = torch.cat([t.flatten() for t in found]) if found else None
    received, sizes, rows = None, [], slice(0, 0)
    if seen is not None:
        rows = seen[1]
        sizes = [torch.Size((*t.shape[:2], rows.stop - rows.start, t.size(3))) for t in (k, v)]
        received = k.new_empty(sum(size.numel() for size in sizes))
    return _Arriving(_exchange(sent, owner, received, other, part), sent, received, sizes, rows)


def _exchange(
    sent: Tensor | None, to: int, received: Tensor | None, come_from: int, part: SequencePart
) -> list[Any]:
    passed = []
    if sent is not None:
        passed.append(dist.P2POp(dist.isend, sent, part.global_rank(to), group=part.group))
    if received is not None:
        passed.append(dist.P2POp(dist.irecv, received, part.global_rank(come_from), group=part.group))
    works: list[Any] = dist.batch_isend_irecv(passed) if passed else []
    return works


def _take(tensor: Tensor, rows: slice) -> Tensor:
    return tensor.narrow(2, rows.start, rows.stop - rows.start)
