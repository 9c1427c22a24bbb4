"""Rows on their way: to the ranks of their experts, and back. Each movement is the other's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelizer import torch_private
from parallelizer.torch_private import has_values

Tensor = torch.Tensor


def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The first `send[0]` rows go to rank 0 of the group, the next `send[1]` to rank 1, and so on; `receive[r]` rows come
    from rank r. rows [sum(send), ...]; the result is [sum(receive), ...]. One all-to-all, and one in backward. A selective
    checkpoint keeps what arrives.
    """
    made: Tensor = _Travel.apply(rows, list(send), list(receive), group)
    return made


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _sent(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sent(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _sent(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return rows.clone()
    if not rows.size(0) and dist.get_backend(group) == "fake" and has_values(rows):
        # torch's fake group takes this for a mistake, as no real one does
        return rows.new_empty(sum(receive), *rows.shape[1:])
    return torch_private.exchanged(rows.contiguous(), receive, send, group)


def spread(tokens: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Each token as often as it has experts, in another order. tokens [T, ...]; row i of the result, [T * copies, ...], is copy
    `order[i]` of all copies, those of one token behind each other. `inverse` is the inverse permutation.
    """
    made: Tensor = _Spread.apply(tokens, order, inverse, copies)
    return made


def combine(rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """The sums of the copies of each token: what `spread` is transposed. rows [T * copies, ...]; the result is [T, ...]."""
    made: Tensor = _Combine.apply(rows, order, inverse, copies)
    return made


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return tokens.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return _summed(gradient, inverse, ctx.copies), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _summed(rows, inverse, copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order // ctx.copies), None, None, None


def _summed(rows: Tensor, inverse: Tensor, copies: int) -> Tensor:
    # A gather and a sum over neighbours: the same on every run, where adding to indices on a GPU is not.
    by_token = rows.index_select(0, inverse).view(-1, copies, *rows.shape[1:])
    return by_token.sum(1)
