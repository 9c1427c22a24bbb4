"""Causal attention over sequences of several lengths, which stand one after another, without a mask.

q [T, H, D] has the queries of all sequences, k [U, Hkv, D] and v [U, Hkv, Dv] their keys and values; H is a multiple of Hkv.
A sequence may have fewer queries than keys: they are its last rows. So its last query sees all its keys, and each query before
it sees one key less. CUDA has one kernel for all sequences (FlashAttention). Elsewhere, and for dtypes and sizes that it does
not take, each sequence has calls of its own of the block kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from parallelizer import torch_private
from parallelizer.styles.context_parallel.balance import Block
from parallelizer.styles.context_parallel.gathering import backward_blocks, forward_blocks
from parallelizer.styles.context_parallel.kernels import takes_flash

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sequences:
    """How many queries and how many keys each sequence has, at least as many keys; and where they begin, int32 [sequences + 1] on
    the device of the queries, with the end of the last.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_begins: Tensor
    key_begins: Tensor

    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, of a sequence; at least two queries: for one, the kernel would put the query heads
        of a key head in place of the rows, and return lse in another order.
        """
        return max(2, *self.queries), max(self.keys)


def forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
    """out [T, H, Dv] in q's dtype, and lse [H, T] in the accumulation dtype."""
    if takes_flash(q, v):
        begins = sequences.query_begins, sequences.key_begins
        return torch_private.flash_attention_of_sequences(q, k, v, *begins, sequences.longest(), scale)
    found = [
        forward_blocks(_batched(q, queries), _batched(k, keys), _batched(v, keys), blocks, scale)
        for queries, keys, blocks in _each(sequences)
    ]
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, 2)[0].transpose(0, 1).contiguous(), torch.cat(lses, 2)[0]


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, in its dtype, and of k and v, in theirs or in the accumulation dtype."""
    if takes_flash(q, v):
        begins = sequences.query_begins, sequences.key_begins
        return torch_private.flash_attention_of_sequences_backward(
            grad_out, q, k, v, out, lse, *begins, sequences.longest(), scale
        )
    found = [
        backward_blocks(
            _batched(grad_out, queries), _batched(q, queries), _batched(k, keys), _batched(v, keys),
            _batched(out, queries), lse.narrow(1, queries.start, queries.stop - queries.start).unsqueeze(0),
            blocks, scale,
        )
        for queries, keys, blocks in _each(sequences)
    ]  # fmt: skip
    grad_q, grad_k, grad_v = (torch.cat(grads, 2)[0].transpose(0, 1) for grads in zip(*found, strict=True))
    return grad_q, grad_k, grad_v


def _each(sequences: Sequences) -> Iterator[tuple[slice, slice, tuple[Block, ...]]]:
    """Of each sequence its queries, its keys, and the blocks that its attention comes to, counted from its own first rows."""
    query = key = 0
    for queries, keys in zip(sequences.queries, sequences.keys, strict=True):
        earlier, rows = keys - queries, slice(0, queries)
        if queries == 1:
            blocks: tuple[Block, ...] = (Block(rows, slice(0, keys), False),)
        else:
            own = Block(rows, slice(earlier, keys), True)
            blocks = (Block(rows, slice(0, earlier), False), own) if earlier else (own,)
        yield slice(query, query + queries), slice(key, key + keys), blocks
        query, key = query + queries, key + keys


def _batched(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows of [T, H, D] as the block kernels take them, [1, H, rows, D]."""
    return tensor.narrow(0, rows.start, rows.stop - rows.start).transpose(0, 1).unsqueeze(0)
