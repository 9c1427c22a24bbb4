"""The method ulysses: exchanges rows for heads, so that every rank computes some heads over the whole
sequence.

One all-to-all sends queries, keys and values, another the result (DeepSpeed Ulysses; Jacobs et al., 2023).
Between them each rank computes attention over the whole sequence (`masked.attend`), so any mask works, and all
ranks have equal work for any mask. Query and key heads must divide by the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallelizer.styles.context_parallel.gathering import refuse_second_order
from parallelizer.styles.context_parallel.order import Order, padded
from parallelizer.styles.context_parallel.part import SequencePart

Tensor = torch.Tensor
Move = Callable[[tuple[Tensor, ...], SequencePart, Order], tuple[Tensor, ...]]


def fits(query_heads: int, key_heads: int, ranks: int) -> bool:
    """Whether every rank gets whole heads of both."""
    return query_heads % ranks == 0 and key_heads % ranks == 0


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: SequencePart,
    order: Order,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """`attend` on all rows, in their original order, of this rank's heads; its result as this rank's rows. W are
    the ranks of the part, and the rows those that they hold.

    q [B, H, S/W, D], k [B, Hkv, S/W, D], v [B, Hkv, S/W, Dv] as `order` deals them out; `attend` is given q [B, H/W, S, D]
    and so on without padding, query heads beside the key heads that they read.
    """
    q, k, v = _Exchange.apply(to_heads, to_rows, part, order, q, k, v)
    found = attend(*(order.whole(t, 2) for t in (q, k, v)))
    (out,) = _Exchange.apply(to_rows, to_heads, part, order, padded(found, 2, q.size(2)))
    result: Tensor = out
    return result


class _Exchange(torch.autograd.Function):
    """One of `to_heads` and `to_rows`; in backward the other."""

    @staticmethod
    def forward(
        ctx: Any, there: Move, back: Move, part: SequencePart, order: Order, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back, ctx.part, ctx.order = back, part, order
        return there(tensors, part, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_order()
        return None, None, None, None, *ctx.back(gradients, ctx.part, ctx.order)


def to_heads(tensors: tuple[Tensor, ...], part: SequencePart, order: Order) -> tuple[Tensor, ...]:
    """[B, H, S/W, D], this rank's rows of all heads, to [B, H/W, S, D], all rows of this rank's heads. One collective."""
    pieces = exchanged([t.chunk(part.ranks, dim=1) for t in tensors], part)
    return tuple(order.join(parts, 2) for parts in pieces)


def to_rows(tensors: tuple[Tensor, ...], part: SequencePart, order: Order) -> tuple[Tensor, ...]:
    """The inverse of `to_heads`."""
    parts = [[order.split(t, 2, rank) for rank in range(part.ranks)] for t in tensors]
    return tuple(torch.cat(pieces, dim=1) for pieces in exchanged(parts, part))


def exchanged(parts: list[Any], among: SequencePart) -> list[list[Tensor]]:
    """Part r of each tensor goes to rank r; what comes back are all ranks' parts for this one."""
    shapes, counts = [p[0].shape for p in parts], [p[0].numel() for p in parts]
    sent = torch.stack([torch.cat([p[rank].reshape(-1) for p in parts]) for rank in range(among.ranks)])
    rows = [row.split(counts) for row in among.all_to_all(sent).unbind()]
    return [[row[i].view(shape) for row in rows] for i, shape in enumerate(shapes)]
