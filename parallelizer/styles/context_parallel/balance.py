"""Head-tail order: which rows of a sequence each rank holds, and which attention blocks it computes for them.

A sequence of S rows is cut into 2W equal chunks for W ranks. Rank r holds chunk r, then chunk 2W-1-r. Under a
causal mask an early chunk is cheap and a late one expensive, so every rank pairs one of each and all ranks
have equal work. Nothing in this file communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """One rectangle of the attention matrix that a rank computes.

    `queries` slices the rank's own rows; `keys` slices the whole sequence in its original order. A causal
    block is square and lies on the diagonal; any other is computed in full.
    """

    queries: slice
    keys: slice
    is_causal: bool


def head_tail(seq_len: int, ranks: int) -> torch.Tensor:
    """The original position of each row after the ranks' parts are put one behind the other, in rank order.

    Returns int64 [seq_len]. Raises ValueError if `seq_len` is not a multiple of `2 * ranks` (any length is
    fine for one rank).
    """
    return torch.cat([local_positions(seq_len, ranks, rank) for rank in range(ranks)])


def head_tail_inverse(seq_len: int, ranks: int) -> torch.Tensor:
    """Where each original row stands in the rank-major order: the inverse permutation of `head_tail`."""
    return torch.argsort(head_tail(seq_len, ranks))


def local_positions(seq_len: int, ranks: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """The original positions of the rows that `rank` holds, in its order: int64 [seq_len / ranks], made on `device`."""
    _check_rank(ranks, rank)
    if ranks == 1:
        return torch.arange(seq_len, device=device)
    length = check_length(seq_len, ranks)
    chunks = chunks_of(ranks, rank)
    return torch.cat([torch.arange(c * length, (c + 1) * length, device=device) for c in chunks])


def chunks_of(ranks: int, rank: int) -> tuple[int, int]:
    """The two chunks, of 2 * ranks, that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def split(tensor: torch.Tensor, dim: int, ranks: int, rank: int) -> torch.Tensor:
    """The rows of `tensor` along `dim` that `rank` holds: a contiguous copy, or `tensor` itself for one rank.

    Differentiable. Raises ValueError if the dimension is not a multiple of `2 * ranks`.
    """
    _check_rank(ranks, rank)
    if ranks == 1:
        return tensor
    length = check_length(tensor.size(dim), ranks)
    # contiguous_format: cat would otherwise keep the strides of, say, a transposed input.
    parts = [tensor.narrow(dim, chunk * length, length) for chunk in chunks_of(ranks, rank)]
    return torch.cat(parts, dim).contiguous()


def unsplit(gathered: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """Undoes `split`: `gathered` holds all the ranks' parts along `dim`, in rank order. A copy, but for one
    rank.

    Differentiable. Raises ValueError if the dimension is not a multiple of `2 * ranks`.
    """
    _check_rank(ranks, 0)
    if ranks == 1:
        return gathered
    check_length(gathered.size(dim), ranks)
    return unsplit_parts(gathered.chunk(ranks, dim), dim)


def unsplit_parts(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """As `unsplit`, from the ranks' parts themselves, in one copy. Every part has the same, even, length."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim)


def blocks(
    local_len: int, ranks: int, rank: int, *, is_causal: bool, local_keys: int | None = None
) -> tuple[Block, ...]:
    """What `rank` must compute for its `local_len` rows; blocks of the same rows stand next to each other.

    Without a causal mask every row needs every key, in whatever order: one block. With it, each of the two
    chunks needs all keys before it in full, and its own keys causally. `local_keys` are a rank's rows of keys, as many as
    of queries if not given. Raises ValueError if there is more than one rank and either number is odd: such rows were not
    split in head-tail order.
    """
    _check_rank(ranks, rank)
    keys = local_len if local_keys is None else local_keys
    length = check_length(local_len * ranks, ranks) if ranks > 1 else local_len
    if ranks > 1:
        check_length(keys * ranks, ranks)
    if ranks == 1 or not is_causal:
        return (Block(slice(0, local_len), slice(0, keys * ranks), is_causal),)
    result = []
    for half, chunk in enumerate(chunks_of(ranks, rank)):
        rows = slice(half * length, (half + 1) * length)
        if chunk > 0:
            result.append(Block(rows, slice(0, chunk * length), False))
        result.append(Block(rows, slice(chunk * length, (chunk + 1) * length), True))
    return tuple(result)


def check_length(seq_len: int, ranks: int) -> int:
    """The rows of one of twice as many chunks as ranks. Raises ValueError for a length that does not divide."""
    if seq_len % (2 * ranks):
        raise ValueError(
            f"a sequence of {seq_len} rows cannot be cut into {2 * ranks} equal chunks, two a rank; "
            f"make its length a multiple of {2 * ranks}"
        )
    return seq_len // (2 * ranks)


def _check_rank(ranks: int, rank: int) -> None:
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks} ranks")
