"""Attention under a user's mask: rows of it against the columns of the whole sequence, tile by tile.

Every mask is exact: boolean or added, one row for all or every row, one head or each. For a tile of rows,
columns before the first and after the last visible column are not computed. So documents, windows and
prefixes cost only their visible part. A mask that needs a gradient uses torch's own attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallelizer import torch_private
from parallelizer.styles.context_parallel import packed
from parallelizer.styles.context_parallel.document_mask import DocumentMask
from parallelizer.styles.context_parallel.gathering import gather, refuse_second_order, scatter_sum
from parallelizer.styles.context_parallel.kernels import (
    accumulation_dtype,
    block_backward,
    block_forward,
    masks_fused,
    no_autocast,
)
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.sequence import GatherSequence

Tensor = torch.Tensor

STEP = 32
"""Tiles begin and end at multiples of so many rows."""
TILE = 128
"""Rows that a tile should have: below it the CPU's kernel takes half as long again for each pair of a query and a key."""


def check(mask: Tensor, q: Tensor, k: Tensor, order: Order) -> Tensor:
    """The mask as [B or 1, H or 1, S/W or 1, S]. Raises ValueError for one that has not this rank's rows and the whole
    sequence's columns.
    """
    ranks, rows, keys = order.ranks, q.size(2), k.size(2)
    whole = order.length or keys * ranks
    if mask.dim() < 2 or mask.dim() > 4:
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} is not [batch, heads, rows, columns]")
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if ranks > 1 and shape[3] == keys > 1 and keys != whole:
        raise ValueError(
            f"attn_mask has {keys} columns, the rows of one rank: it was made from a local length, and the sequence "
            f"has {whole}. A batch entry `attention_mask`, [batch, sequence], stays whole if buffers.batch does not list it"
        )
    if shape[3] not in (1, whole):
        raise ValueError(f"attn_mask has {shape[3]} columns, and the sequence {whole}")
    if shape[2] not in (1, rows):
        every = shape[2] in (whole, rows * ranks)
        hint = " (all rows; list it among the batch's buffers, which are split)" if every else ""
        raise ValueError(f"attn_mask has {shape[2]} rows{hint}, and this rank {rows}")
    if shape[1] not in (1, q.size(1)) or shape[0] not in (1, q.size(0)):
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not fit queries of {tuple(q.shape)}")
    if mask.dim() < 4:
        mask = mask.reshape(shape)
    return mask if shape[3] == whole else mask.expand(*shape[:3], whole)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Attention of all rows of q over all of k and v, with grouped heads; `mask` as `check` returns it."""
    if isinstance(mask, DocumentMask):
        calls = mask.calls()
        if calls is not None:
            return packed.attend(q, k, v, calls, scale)
        mask = mask.dense()
    if mask is not None and not mask.requires_grad and masks_fused(q, v):
        out: Tensor = _Tiled.apply(q, k, v, mask, scale)
        return out
    square = not is_causal or q.size(2) == k.size(2)
    if mask is None and square and q.dtype == torch.float32 and q.size(1) != k.size(1):
        result: Tensor = _Whole.apply(q, k, v, is_causal, scale)
        return result
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    with no_autocast(q.device.type):
        # The operator and not the function, which would count as an attention call of the model.
        out = torch.ops.aten.scaled_dot_product_attention.default(
            q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
    return out


class _Whole(torch.autograd.Function):
    """Attention without a mask as one block. On CUDA, torch's attention computes grouped heads in float32 from single operators,
    which hold all scores.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        out, lse = block_forward(q, k, v, is_causal=is_causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"is_causal": is_causal, "scale": scale}
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_order()
        q, k, v, out, lse = ctx.saved_tensors
        return *block_backward(gradients[0], q, k, v, out, lse, **ctx.options), None, None


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, group: dist.ProcessGroup, order: Order, scale: float
) -> Tensor:
    """Local rows against gathered keys, which are kept for backward."""
    keys, values = gather_whole(k, v, group, order)
    return attend(q, keys, values, mask=mask, is_causal=False, scale=scale)


def gather_whole(k: Tensor, v: Tensor, group: dist.ProcessGroup, order: Order) -> tuple[Tensor, Tensor]:
    """The whole keys and values without padding, with their gradients: `gathering.gather`."""
    keys, values = _Gather.apply(group, order, k, v)
    return order.whole(keys, 2), order.whole(values, 2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, order: Order, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.order = group, order
        return gather(k, v, group, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_order()
        grad_keys, grad_values = gradients
        return None, None, *scatter_sum(grad_keys, grad_values, grad_keys.dtype, ctx.group, ctx.order)


def of_heads(mask: Tensor, local_rows: int, group: dist.ProcessGroup, order: Order) -> Tensor:
    """The mask of all rows, for this rank's heads."""
    if isinstance(mask, DocumentMask):
        return mask.whole()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if mask.size(2) == local_rows and local_rows > 1:
        mask = order.whole(GatherSequence.apply(mask, 2, group, order), 2)
    return mask.chunk(ranks, dim=1)[rank] if mask.size(1) > 1 else mask


@dataclass(frozen=True)
class Tile:
    """Rows of the batch and of the queries, and the keys that any of them sees; `every` if all see all of these."""

    batch: slice
    rows: slice
    keys: slice
    every: bool


def tiles(mask: Tensor, batch: int, rows: int) -> list[Tile]:
    """What must be computed under a mask [B or 1, H or 1, rows or 1, columns], tile by tile.

    One tile of everything where there are no values to look at, as in a dry run. Rows that see nothing are taken to see the
    first column. What is found is remembered with the mask, which one layer after the other uses.
    """
    if mask.size(2) == 1 or not torch_private.has_values(mask):
        return [Tile(slice(0, batch), slice(0, rows), slice(0, mask.size(3)), False)]
    if mask.is_inference():  # which does not count its changes
        return list(_found(mask, batch, rows))
    seen_as, known = (mask._version, batch), getattr(mask, _TILES, None)
    if known is None or known[0] != seen_as:
        known = seen_as, list(_found(mask, batch, rows))
        setattr(mask, _TILES, known)
    found: list[Tile] = known[1]
    return found


_TILES = "_parallelizer_tiles"


def _found(mask: Tensor, batch: int, rows: int) -> Iterator[Tile]:
    strips = _strips(mask)
    for which, of_batch in enumerate(strips):
        where = slice(0, batch) if len(strips) == 1 else slice(which, which + 1)
        begin, columns, whole, least = 0, (0, 1), 0, 0
        for at, (first, last, pairs) in enumerate(of_batch):
            start, end = at * STEP, min(rows, (at + 1) * STEP)
            if start > begin:
                union = min(columns[0], first), max(columns[1], last)
                apart = least + (end - start) * (last - first)
                waste = (end - begin) * (union[1] - union[0]) / apart
                if waste <= (1.4 if end - begin <= TILE else 1.04):
                    columns, whole, least = union, whole + pairs, apart
                    continue
                yield _tile(where, begin, start, columns, whole, mask)
            begin, columns, whole, least = start, (first, last), pairs, (end - start) * (last - first)
        yield _tile(where, begin, rows, columns, whole, mask)


def _strips(mask: Tensor) -> list[list[tuple[int, int, int]]]:
    """For each row of the batch and every `STEP` rows: the first column that any of them sees in any head, the last and one, 0
    and 1 where they see nothing, and how many pairs of a row and a column see each other in all heads.

    The host reads once, whatever the mask: on a GPU it waits for each read.
    """
    shown = mask if mask.dtype == torch.bool else mask > float("-inf")
    any_head, all_heads = (shown.squeeze(1),) * 2 if shown.size(1) == 1 else (shown.any(1), shown.all(1))
    even = shown.size(2) // STEP * STEP  # the rows behind them are a strip of fewer
    seen, pairs = [], []
    for start, size, step in ((0, even, STEP), (even, shown.size(2) - even, shown.size(2) - even)):
        if size:
            seen.append(any_head.narrow(1, start, size).unflatten(1, (-1, step)).any(2))
            pairs.append(all_heads.narrow(1, start, size).unflatten(1, (-1, step)).sum((2, 3)))
    some = torch.cat(seen, 1)
    columns = some.to(torch.uint8)
    first = columns.argmax(2)
    last = torch.where(some.any(2), columns.size(2) - columns.flip(2).argmax(2), 1)
    found: list[list[tuple[int, int, int]]] = torch.stack([first, last, torch.cat(pairs, 1)], 2).tolist()
    return found


def _tile(where: slice, begin: int, end: int, columns: tuple[int, int], pairs: int, mask: Tensor) -> Tile:
    every = mask.dtype == torch.bool and pairs == (end - begin) * (columns[1] - columns[0])
    return Tile(where, slice(begin, end), slice(*columns), every)


class _Tiled(torch.autograd.Function):
    """`attend` under a mask without gradient, by block kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.tiles, ctx.scale = tiles(mask, q.size(0), q.size(2)), scale
        if _all_of(ctx.tiles, k):
            out, lse = block_forward(q, k, v, is_causal=False, scale=scale, mask=_of_tile(mask, ctx.tiles[0]))
        else:
            out = q.new_empty(*q.shape[:3], v.size(3))
            lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
            for tile in ctx.tiles:
                part, part_lse = block_forward(
                    _rows(q, tile), _keys(k, tile), _keys(v, tile),
                    is_causal=False, scale=scale, mask=_of_tile(mask, tile),
                )  # fmt: skip
                _rows(out, tile).copy_(part)
                _rows(lse, tile).copy_(part_lse)
        # Under a shape that no attention of torch's saves: see `gathering`.
        ctx.save_for_backward(q, k, v, mask, out, lse.unsqueeze(0))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        (grad_out,) = gradients
        q, k, v, mask, out, lse = ctx.saved_tensors
        lse = lse.squeeze(0)
        if _all_of(ctx.tiles, k):
            grads = block_backward(
                grad_out, q, k, v, out, lse,
                is_causal=False, scale=ctx.scale, mask=_of_tile(mask, ctx.tiles[0]),
            )  # fmt: skip
            return *grads, None, None
        wide = accumulation_dtype(q.dtype)
        grad_q, grad_k, grad_v = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
        for tile in ctx.tiles:
            part_q, part_k, part_v = block_backward(
                _rows(grad_out, tile), _rows(q, tile), _keys(k, tile), _keys(v, tile), _rows(out, tile),
                _rows(lse, tile), is_causal=False, scale=ctx.scale, mask=_of_tile(mask, tile),
            )  # fmt: skip
            _rows(grad_q, tile).add_(part_q)
            _keys(grad_k, tile).add_(part_k)
            _keys(grad_v, tile).add_(part_v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _all_of(found: list[Tile], k: Tensor) -> bool:
    """Whether there is one tile, of all keys."""
    return len(found) == 1 and found[0].keys == slice(0, k.size(2))


def _rows(tensor: Tensor, tile: Tile) -> Tensor:
    return _cut(tensor, tile.batch, tile.rows)


def _keys(tensor: Tensor, tile: Tile) -> Tensor:
    return _cut(tensor, tile.batch, tile.keys)


def _of_tile(mask: Tensor, tile: Tile) -> Tensor | None:
    if tile.every:
        return None
    if mask.size(0) > 1:
        mask = mask.narrow(0, tile.batch.start, tile.batch.stop - tile.batch.start)
    if mask.size(2) > 1:
        mask = mask.narrow(2, tile.rows.start, tile.rows.stop - tile.rows.start)
    return mask.narrow(3, tile.keys.start, tile.keys.stop - tile.keys.start)


def _cut(tensor: Tensor, batch: slice, rows: slice) -> Tensor:
    # Not by indexing: see `gathering`.
    tensor = tensor.narrow(0, batch.start, batch.stop - batch.start)
    return tensor.narrow(2, rows.start, rows.stop - rows.start)
