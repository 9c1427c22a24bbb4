"""Attention of packed documents by kernels that need no mask: `runs` says which calls of `varlen` it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parallelizer.styles.context_parallel import varlen
from parallelizer.styles.context_parallel.gathering import refuse_second_order
from parallelizer.styles.context_parallel.kernels import accumulation_dtype
from parallelizer.styles.context_parallel.runs import KernelCall

Tensor = torch.Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, calls: list[list[KernelCall]], scale: float) -> Tensor:
    """Attention of the rows q [B, H, R, D] over k [B, Hkv, S, D] and v [B, Hkv, S, Dv], the keys of whole sequences in their
    order; `calls` for each row of the batch, or for all of them.
    """
    out: Tensor = _Packed.apply(q, k, v, calls, scale)
    return out


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: list[list[KernelCall]], scale: float
    ) -> Tensor:
        found = [
            varlen.forward(
                _rows(q, row, call), _keys(k, row, call), _keys(v, row, call), call.sequences, scale
            )
            for row, call in _in_order(calls, q.size(0))
        ]
        outs, lses = zip(*found, strict=True)
        out = _joined(outs).view(q.size(0), q.size(2), q.size(1), v.size(3)).transpose(1, 2)
        ctx.calls, ctx.scale = calls, scale
        # Each lse is dense, as kernels read it. Joined, they have a shape that no attention of torch's saves: see `gathering`.
        ctx.save_for_backward(q, k, v, out, _joined([lse.flatten() for lse in lses]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_order()
        (grad_out,) = gradients
        q, k, v, out, lse = ctx.saved_tensors
        calls = list(_in_order(ctx.calls, q.size(0)))
        lses = lse.split([q.size(1) * (call.rows.stop - call.rows.start) for _, call in calls])
        wide = accumulation_dtype(q.dtype)
        of_queries = []
        # [B, S, Hkv, D], as varlen has rows: the sum over calls, which may have the same keys.
        grad_k, grad_v = (t.new_zeros(t.size(0), t.size(2), t.size(1), t.size(3), dtype=wide) for t in (k, v))
        for (row, call), of_call in zip(calls, lses, strict=True):
            grad_q, *of_keys = varlen.backward(
                _rows(grad_out, row, call), _rows(q, row, call), _keys(k, row, call), _keys(v, row, call),
                _rows(out, row, call), of_call.view(q.size(1), -1), call.sequences, ctx.scale,
            )  # fmt: skip
            of_queries.append(grad_q)
            for total, grad in zip((grad_k, grad_v), of_keys, strict=True):
                _add(total.select(0, row), grad, call)
        grad_q = _joined(of_queries).view(q.size(0), q.size(2), q.size(1), q.size(3)).transpose(1, 2)
        return grad_q, grad_k.transpose(1, 2).to(k.dtype), grad_v.transpose(1, 2).to(v.dtype), None, None


def _in_order(calls: list[list[KernelCall]], batch: int) -> Iterator[tuple[int, KernelCall]]:
    """Each call with its row of the batch."""
    for row in range(batch):
        for call in calls[row if len(calls) > 1 else 0]:
            yield row, call


def _rows(tensor: Tensor, row: int, call: KernelCall) -> Tensor:
    """The queries of a call, or what has as many rows: [rows, H, D]."""
    return tensor.select(0, row).transpose(0, 1).narrow(0, call.rows.start, call.rows.stop - call.rows.start)


def _keys(tensor: Tensor, row: int, call: KernelCall) -> Tensor:
    """The keys of a call, or their values: [keys, Hkv, D]."""
    keys = tensor.select(0, row).transpose(0, 1)
    if isinstance(call.keys, slice):
        return keys.narrow(0, call.keys.start, call.keys.stop - call.keys.start)
    return keys.index_select(0, call.keys)


def _add(total: Tensor, grad: Tensor, call: KernelCall) -> None:
    """Adds the gradients of a call's keys to those of all keys."""
    if isinstance(call.keys, slice):
        total.narrow(0, call.keys.start, call.keys.stop - call.keys.start).add_(grad)
    else:
        total.index_add_(0, call.keys, grad.to(total.dtype))


def _joined(parts: Any) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
