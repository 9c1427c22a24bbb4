"""`flex_attention` over a split sequence: its masks and score functions take positions in the whole sequence.

A rank evaluates them for its own rows, at their positions in the whole sequence, against all keys. A pure
mask is then handled like any other mask. If a function changes the scores, or a log-sum-exp is requested,
plain operations on gathered keys compute scores, function, mask and softmax in the accumulation dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.overrides import TorchFunctionMode

from parallelizer.styles.context_parallel import masked
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.choice import Heads, cheapest
from parallelizer.styles.context_parallel.kernels import accumulation_dtype, no_autocast
from parallelizer.styles.context_parallel.part import whole as whole_part
from parallelizer.styles.context_parallel.sequence import PASS_DEVICE, UNKNOWN, CurrentOrder
from parallelizer.styles.context_parallel.ulysses import fits, ulysses_attention
from parallelizer.torch_private import FlexAnswer, FlexCall, has_values

Tensor = torch.Tensor
Function = Callable[..., Tensor]

_said = False


class Options(Protocol):
    """What of `intercept.ContextOptions` is read here."""

    @property
    def method(self) -> str: ...
    @property
    def keep_gathered(self) -> bool: ...
    @property
    def ulysses_degree(self) -> int | None: ...


class Region(Protocol):
    """A module whose calls are caught: what errors call it, and where and how its sequence is split."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def options(self) -> Options: ...
    @property
    def sequence(self) -> CurrentOrder: ...


def rows_of(region: Region, local_rows: int, device: torch.device | None = None) -> Tensor:
    """The positions in the whole sequence of this rank's rows, in their order: int64 [local_rows], or [batch, local_rows] where
    rows of the batch are dealt out each in its own way. Padding, which is masked, is evaluated like the last row.
    """
    order = region.sequence.order
    rows = order.positions(local_rows * order.ranks, dist.get_rank(region.group), device)
    return rows if order.length is None else rows.clamp(max=order.length - 1)


def whole_of(region: Region, local_rows: int) -> int:
    """How long the sequence is of which a rank holds so many rows."""
    order = region.sequence.order
    return local_rows * order.ranks if order.length is None else order.length


def check(region: Region, query: Tensor, key: Tensor, mask: BlockMask | None) -> None:
    """Raises ValueError for a block mask that is not of the whole sequence, and for a sequence of unknown length."""
    if not region.sequence.known:
        raise ValueError(f"{UNKNOWN}, and its padding would be seen; {PASS_DEVICE}")
    if mask is None:
        return
    local, made_for = (query.size(-2), key.size(-2)), tuple(mask.seq_lengths)
    whole = (whole_of(region, local[0]), whole_of(region, local[1]))
    if made_for == whole:
        return
    if made_for == local:
        raise ValueError(
            f"block_mask was made for {made_for[0]} rows and {made_for[1]} keys, those of one rank, and the sequence has "
            f"{whole[0]} and {whole[1]}: make it with create_block_mask(mask_mod, B, H, {whole[0]}, {whole[1]}), whose "
            "mask_mod is then asked with positions in the whole sequence"
        )
    raise ValueError(
        f"block_mask was made for {made_for[0]} rows and {made_for[1]} keys, and the sequence has {whole[0]} and {whole[1]}"
    )


def attention(
    region: Region, call: FlexCall, q: Tensor, k: Tensor, v: Tensor, first: tuple[int, int]
) -> FlexAnswer:
    """What `call` computes for this rank's rows, exactly. q, k and v are the local parts of its tensors, [B, H, S/W, D];
    `first` are the batch entry and the head of the whole that they begin with.

    Raises ValueError for what does not fit together, before any communication.
    """
    _say_once(region.name)
    mask_mod = _mask_mod(call.block_mask)
    rows, keys = rows_of(region, q.size(2), q.device), whole_of(region, k.size(2))
    if call.score_mod is None and not call.statistics:
        sizes = (q.size(0), q.size(1))
        out = context_attention(
            q,
            k,
            v,
            group=region.group,
            is_causal=False,
            scale=call.scale,
            attn_mask=None if mask_mod is None else evaluated(mask_mod, sizes, first, rows, keys),
            method=region.options.method,
            keep_gathered=region.options.keep_gathered,
            ulysses_degree=region.options.ulysses_degree,
            order=region.sequence.order,
        )
        return FlexAnswer(out)
    return _plain(region, call, mask_mod, q, k, v, rows, first)


def _plain(
    region: Region, call: FlexCall, mask_mod: Function | None, q: Tensor, k: Tensor, v: Tensor, rows: Tensor,
    first: tuple[int, int],
) -> FlexAnswer:  # fmt: skip
    """As `attention`, by `plain_attention` on whole keys: all heads of this rank's rows, or all rows of its heads."""
    group, method, order = region.group, region.options.method, region.sequence.order
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    heads = Heads(q.size(1), k.size(1))
    if method == "auto":
        method = cheapest(heads, ranks, is_causal=False, masked=True)
    if order.length is not None and q.size(2) != k.size(2):
        raise ValueError("a padded sequence cannot attend to another one: make the lengths divide")
    if method in ("ring", "ulysses-ring"):
        raise ValueError(f"{method} takes no score_mod, and gives no log-sum-exp; all-gather and ulysses do")
    if method == "ulysses" and not fits(*heads, ranks):
        raise ValueError(
            f"{heads.queries} query and {heads.keys} key heads cannot be dealt out to {ranks} ranks"
        )
    if method == "ulysses" and not call.statistics:
        whole = torch.arange(whole_of(region, q.size(2)), device=q.device)
        mine = (first[0], first[1] + rank * (heads.queries // ranks))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plain_attention(q, k, v, call.score_mod, mask_mod, call.scale, whole, mine).out

        return FlexAnswer(ulysses_attention(q, k, v, whole_part(group), order, attend))
    keys, values = masked.gather_whole(k, v, group, order)
    return plain_attention(q, keys, values, call.score_mod, mask_mod, call.scale, rows, first)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Function | None,
    mask_mod: Function | None,
    scale: float,
    rows: Tensor,
    first: tuple[int, int] = (0, 0),
) -> FlexAnswer:
    """softmax(score_mod(q k^T * scale)) v under a mask, with its log-sum-exp and largest scores; holds all scores.

    q [B, H, R, D] are the rows of the sequence at positions `rows`, [R] or [B, R]; k [B, Hkv, S, D] and v [B, Hkv, S, Dv] are
    all of it, in order. In the accumulation dtype, in which the statistics stay; a row that may see nothing gets zeros, as torch
    gives it.
    """
    wide, sizes = accumulation_dtype(q.dtype), (q.size(0), q.size(1))
    with no_autocast(q.device.type):
        group = q.size(1) // k.size(1)
        keys, values = (t.to(wide).repeat_interleave(group, dim=1) for t in (k, v))
        scores = q.to(wide) @ keys.transpose(-1, -2) * scale
        if score_mod is not None:
            scores = evaluated(score_mod, sizes, first, rows, k.size(2), scores).to(wide)
        if mask_mod is not None:
            seen = evaluated(mask_mod, sizes, first, rows, k.size(2))
            scores = torch.where(seen, scores, -torch.inf)
        top = scores.amax(dim=-1)
        blind = (top == -torch.inf).unsqueeze(-1)
        # The gradient of a softmax over nothing is nan, so such rows are taken out before and not after.
        sane = torch.where(blind, 0.0, scores)
        weights = torch.where(blind, 0.0, sane.softmax(dim=-1))
        lse = torch.where(blind.squeeze(-1), -torch.inf, sane.logsumexp(dim=-1))
        return FlexAnswer((weights @ values).to(q.dtype), lse, top)


def evaluated(
    function: Function,
    sizes: tuple[int, int],
    first: tuple[int, int],
    rows: Tensor,
    keys: int,
    scores: Tensor | None = None,
) -> Tensor:
    """A `mask_mod`, or a `score_mod` on `scores` [B, H, R, S], for batch entries and heads of these sizes from `first` on, at
    positions `rows`, [R] or [B, R], and all of `keys`: [B, H, R, S], or 1 instead of B and H where a mask does not ask for them.
    """
    device = rows.device
    b, h = (torch.arange(at, at + size, device=device) for at, size in zip(first, sizes, strict=True))
    # Innermost first. Torch's own eager path and its compiler do the same, so that what a function says of one pair of
    # positions is all that counts.
    given = () if scores is None else (0,)
    each = 0 if rows.ndim == 2 else None
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, each, None)):
        function = torch.vmap(function, in_dims=(*given, *dims))
    before = () if scores is None else (scores,)
    with _TensorIndices():
        result = function(*before, b, h, rows, torch.arange(keys, device=device))
    if scores is None:
        for dim in (0, 1):  # vmap repeats what does not depend on an index without copying it
            result = result.narrow(dim, 0, 1) if result.stride(dim) == 0 else result
    return result


class _TensorIndices(TorchFunctionMode):
    """Inside, `table[i, j]` with tensors of one number looks up; outside, torch would ask for the numbers, which vmap has not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in indices) and all(
                isinstance(i, Tensor | int) for i in indices
            ):
                places = [
                    i if isinstance(i, Tensor) else torch.tensor(i, device=table.device) for i in indices
                ]
                return torch.ops.aten.index(table, places)
        return func(*args, **(kwargs or {}))


def _mask_mod(mask: BlockMask | None) -> Function | None:
    """The function of a block mask, None where it lets everything be seen. Raises ValueError for blocks without one."""
    if mask is None:
        return None
    if mask.mask_mod is not noop_mask:
        return mask.mask_mod
    if has_values(mask.kv_num_blocks) and mask.sparsity() > 0:
        raise ValueError(
            "block_mask leaves out blocks and has no mask_mod that says which pairs are left; give it one"
        )
    return None


def _say_once(name: str) -> None:
    global _said
    if _said or dist.get_rank() != 0:
        return
    _said = True
    warnings.warn(
        f"{name} calls flex_attention, which under context parallelism runs as attention under a mask of this rank's rows "
        "against all keys, and not by FlexAttention's kernels",
        stacklevel=2,
    )
