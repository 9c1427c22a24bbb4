"""Exact attention over a sequence whose rows are distributed over the ranks of a process group."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from parallelizer.styles.context_parallel import masked
from parallelizer.styles.context_parallel.choice import METHODS, Heads, cheapest
from parallelizer.styles.context_parallel.document_mask import dense, has_elements
from parallelizer.styles.context_parallel.dropout import dropped_attention
from parallelizer.styles.context_parallel.gathering import GatheredAttention
from parallelizer.styles.context_parallel.order import Order, padded
from parallelizer.styles.context_parallel.part import SequencePart, row_and_column, whole
from parallelizer.styles.context_parallel.ring import Ring, RingAttention
from parallelizer.styles.context_parallel.ring_operator import compiled_ring
from parallelizer.styles.context_parallel.ulysses import fits, ulysses_attention
from parallelizer.styles.context_parallel.ulysses_ring import chosen_degree, mask_of_row, orders_of_grid

Tensor = torch.Tensor


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup,
    is_causal: bool,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    method: str = "all-gather",
    keep_gathered: bool = False,
    ulysses_degree: int | None = None,
    order: Order | None = None,
    dropout_p: float = 0.0,
    dropout_share: int = 0,
) -> Tensor:
    """softmax(q k^T * scale + mask) v over the whole sequence, for this rank's rows of it.

    q [B, H, S/W, D], k [B, Hkv, S/W, D] and v [B, Hkv, S/W, Dv] are the rows that `order` (head-tail, if not given) gives
    this rank of `group`, of one size on all ranks; H is a multiple of Hkv, and grouped heads travel unexpanded. Without a
    causal mask, k and v may be rows of another sequence than q, of another length, unless that is padded.
    `scale` None means 1/sqrt(D). `attn_mask` is boolean (true where attention is paid) or is added to the scores;
    it has this rank's rows (or one row for all) against the whole sequence's columns, in its original order:
    [B or 1, H or 1, S/W or 1, S]. Returns [B, H, S/W, Dv] in q's dtype, the same rows.

    `method` is `all-gather`, `ring`, `ulysses`, `ulysses-ring`, or `auto`, which takes the one that sends least
    (`choice.cheapest`). Ulysses-ring deals heads out to `ulysses_degree` ranks, or to as many as send least.
    Collective, in the forward and in the backward: every rank of the group makes the same calls in the same
    order. With K bytes of local keys and values, W ranks and g query heads to a key head, a rank sends
    forward and backward together (`choice.sent`): all-gather 3(W-1)K, or 2(W-1)K with `keep_gathered`, which keeps in
    memory what the backward else gathers again, and with a mask; ring 3(W-1)K, in head-tail order and under a causal
    mask less by K/2 for every rank before; ulysses 2(W-1)/W (1+g) K; ulysses-ring with U ranks the sum of ulysses over U
    and a ring of W/U. Can be differentiated once: `create_graph` raises RuntimeError.

    With `dropout_p` above 0 it is all-gather, whatever is asked for, on a path of its own (`dropout.dropped_attention`):
    weights are dropped by random numbers that differ from rank to rank and follow from the default generator's state.
    Ranks outside of `group` that hold other heads or sequences, and are seeded alike, draw others if each has a
    `dropout_share` of its own.

    Raises ValueError, before any communication, for shapes, dtypes or a group that do not fit.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this rank is not in the process group that the sequence is split over")
    _check_shapes(q, k, v, is_causal)
    order = order or Order(ranks)
    if order.ranks != ranks:
        raise ValueError(f"the order is of {order.ranks} ranks, and the group has {ranks}")
    if order.length is not None and q.size(2) != k.size(2):
        raise ValueError("a padded sequence cannot attend to another one: make the lengths divide")
    plan = order.blocks(q.size(2), rank, is_causal=is_causal, keys=k.size(2))
    if scale is None:
        scale = q.size(-1) ** -0.5
    if attn_mask is not None:
        if is_causal:
            raise ValueError("is_causal and attn_mask exclude each other, as in scaled_dot_product_attention")
        attn_mask = masked.check(attn_mask, q, k, order)
    heads = Heads(q.size(1), k.size(1))
    if ulysses_degree is not None and method not in ("ulysses-ring", "auto"):
        raise ValueError(f"ulysses_degree is an option of ulysses-ring, and not of {method}")
    if attn_mask is not None and (dropout_p or (ranks > 1 and "ring" in method) or has_elements(attn_mask)):
        attn_mask = dense(attn_mask)
    if dropout_p:
        return dropped_attention(
            q, k, v, attn_mask, group, order,
            is_causal=is_causal, scale=scale, dropout_p=dropout_p, share=dropout_share,
        )  # fmt: skip
    degree = 1
    if method == "ulysses-ring" and ranks > 1:
        degree = chosen_degree(heads, ranks, ulysses_degree)
        method = {1: "ring", ranks: "ulysses"}.get(degree, method)
    if attn_mask is None and plan is None and (ranks == 1 or method not in ("ulysses", "ulysses-ring")):
        # Ulysses has all rows in their original order; for others only a mask can say what such rows see.
        attn_mask, is_causal = _causal_rows(order, q, rank), False
    if method == "auto":
        method = cheapest(
            heads,
            ranks,
            is_causal=is_causal,
            masked=attn_mask is not None,
            keep_gathered=keep_gathered,
            degree=ulysses_degree,
        )
        degree = chosen_degree(heads, ranks, ulysses_degree) if method == "ulysses-ring" else 1
    if method == "ulysses" and not fits(*heads, ranks):
        raise ValueError(
            f"{heads.queries} query and {heads.keys} key heads cannot be dealt out to {ranks} ranks; "
            "ulysses needs both to divide"
        )
    if ranks == 1 or method == "all-gather":
        if attn_mask is not None:
            return masked.gathered_attention(q, k, v, attn_mask, group, order, scale)
        out: Tensor = GatheredAttention.apply(q, k, v, group, order, plan, scale, keep_gathered)
        return out
    if method == "ulysses":
        if attn_mask is not None:
            attn_mask = masked.of_heads(attn_mask, q.size(2), group, order)
        run = partial(masked.attend, mask=attn_mask, is_causal=is_causal, scale=scale)
        return ulysses_attention(q, k, v, whole(group), order, run)
    if method not in ("ring", "ulysses-ring"):
        raise ValueError(f"there is no method {method!r}; there are {', '.join(METHODS)} and auto")
    if attn_mask is not None and attn_mask.requires_grad:
        named = "the ring" if method == "ring" else method
        raise ValueError(f"{named} gives an attn_mask no gradient; all-gather and ulysses do")
    if method == "ring":
        return _ring(q, k, v, attn_mask, part=whole(group), order=order, is_causal=is_causal, scale=scale)
    row, column = row_and_column(group, degree)
    within, between = orders_of_grid(order, row.places[0], degree)
    if attn_mask is not None:
        attn_mask = mask_of_row(attn_mask, q.size(2), row, within)
    around = partial(_ring, mask=attn_mask, part=column, order=between, is_causal=is_causal, scale=scale)
    return ulysses_attention(q, k, v, row, within, around)


def _ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    part: SequencePart,
    order: Order,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """The ring over a part, of rows that `order` deals out over its ranks."""
    if is_causal and order.blocks(q.size(2), part.rank, is_causal=True) is None:
        mask, is_causal = _causal_rows(order, q, part.rank), False
    if mask is None and order.length is not None and order.varies:
        mask = q.new_ones(1, 1, 1, order.length, dtype=torch.bool)  # of rows that are no padding
    if mask is not None:
        mask = _padded_columns(mask, k.size(2) * order.ranks)
    run = compiled_ring if torch.compiler.is_compiling() else RingAttention.apply
    out: Tensor = run(q, k, v, Ring(part, order, is_causal, scale, mask))
    return out


def _causal_rows(order: Order, q: Tensor, rank: int) -> Tensor:
    """A mask [R, 1, rows, S], R 1 or the batch: true where this rank's rows see a key under a causal mask."""
    rows = q.size(2) * order.ranks
    mine = order.positions(rows, rank, q.device)
    columns = torch.arange(order.length or rows, device=q.device)
    return (columns <= mine.unsqueeze(-1)).reshape(-1, 1, q.size(2), len(columns))


def _padded_columns(mask: Tensor, columns: int) -> Tensor:
    """With a column for every key, padding included, which nothing sees."""
    return padded(mask, 3, columns, False if mask.dtype == torch.bool else float("-inf"))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v must be [batch, heads, rows, size], not {_shapes(q, k, v)}")
    if k.shape[:3] != v.shape[:3] or q.size(0) != k.size(0) or q.size(3) != k.size(3):
        raise ValueError(f"q, k and v do not fit together: {_shapes(q, k, v)}")
    if is_causal and q.size(2) != k.size(2):
        raise ValueError(
            f"this rank has {q.size(2)} rows of queries and {k.size(2)} of keys; under a causal mask they must be the same rows"
        )
    if q.size(1) % k.size(1):
        raise ValueError(f"{q.size(1)} query heads are not a multiple of {k.size(1)} key and value heads")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise ValueError(f"q, k and v must have one floating dtype and one device, not {kinds}")
    if not q.is_floating_point():
        raise ValueError(f"attention needs a floating dtype, not {q.dtype}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)
