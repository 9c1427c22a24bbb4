"""Attention with dropout: this rank's rows against whole keys, each weight of theirs dropped or kept by a draw of its own.

No kernel that is fused lets its random numbers be chosen, so this one is written out. Where a weight is
dropped must not depend on how the sequence is split, in distribution: every (row, key) pair of every head is
drawn once, by the rank that holds the row, and rows of different ranks are drawn independently. So each call
takes one number from torch's default generator, which ranks that hold parts of one sequence may have seeded
alike or otherwise, and adds to it which rank this is: the seed of a generator for this call alone. A
checkpoint puts the default generator back before it recomputes, so the same is drawn again;
`torch.manual_seed` makes a run repeatable. The draws are not those of one device, whose order a split run
cannot keep; their distribution is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallelizer.styles.context_parallel.gathering import refuse_second_order
from parallelizer.styles.context_parallel.kernels import accumulation_dtype, no_autocast
from parallelizer.styles.context_parallel.masked import gather_whole
from parallelizer.styles.context_parallel.order import Order

Tensor = torch.Tensor
_STEP = 0x9E3779B97F4A7C15
"""Odd, also in its lower 32 bits, which are all that torch's CPU generator takes: no two ranks have one seed."""


def dropped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: dist.ProcessGroup,
    order: Order,
    *,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    share: int = 0,
) -> Tensor:
    """dropout(softmax(q k^T * scale + mask)) v for this rank's rows: q [B, H, S/W, D] to [B, H, S/W, Dv] in q's dtype.

    k [B, Hkv, S/W, D] and v [B, Hkv, S/W, Dv] are gathered, and kept for backward. `mask` is as in
    `attention.context_attention`, and has a gradient if it wants one; with `is_causal` a row sees what is not behind it,
    wherever `order` has put it. Sums are made in the accumulation dtype. Weights are kept with probability
    1 - `dropout_p` and then divided by it; with 1 all is zero. `share` numbers the ranks that hold the same rows, but
    other heads or other sequences. The weights of one call lie in memory whole, in forward and again in backward,
    but not in between. Raises ValueError for a probability that is none.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p={dropout_p} is no probability")
    seed = draw_seed(dist.get_rank(group) + dist.get_world_size(group) * share)
    keys, values = gather_whole(k, v, group, order)
    positions: Tensor | None = None
    if is_causal:
        positions = order.positions(q.size(2) * order.ranks, dist.get_rank(group), q.device)
        positions = positions.reshape(-1, 1, q.size(2))  # of every row of the batch, or for all of them
    out: Tensor = _Dropped.apply(q, keys, values, mask, positions, scale, dropout_p, seed)
    return out


def draw_seed(part: int) -> int | None:
    """A seed for one call on one part of the weights, as a rank has, by one number of the default generator; None
    where tensors are fake, and hold none.
    """
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
    if type(drawn) is not torch.Tensor:
        return None
    return (int(drawn) + (part + 1) * _STEP) % 2**63


def kept(shape: tuple[int, ...], dropout_p: float, seed: int | None, device: torch.device) -> Tensor:
    """Which weights are kept, boolean: the same ones for the same seed, shape and kind of device."""
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(
        1.0 - dropout_p, generator=generator
    )


class _Dropped(torch.autograd.Function):
    """Backward computes the weights again, and draws again what was dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        scale: float,
        dropout_p: float,
        seed: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q, keys, values, mask, positions)
        ctx.numbers = scale, dropout_p, seed
        return _attend(q, keys, values, mask, positions, *ctx.numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_order()
        *saved, positions = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:4]
        inputs: list[Any] = [
            t if t is None else t.detach().requires_grad_(w) for t, w in zip(saved, wanted, strict=True)
        ]
        arguments: Any = (*inputs, positions, *ctx.numbers)
        with torch.enable_grad():
            out = _attend(*arguments)
        found = iter(
            torch.autograd.grad(out, [t for t, w in zip(inputs, wanted, strict=True) if w], gradients)
        )
        return *(next(found) if w else None for w in wanted), None, None, None, None


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: int | None,
) -> Tensor:
    wide, heads = accumulation_dtype(q.dtype), keys.size(1)
    with no_autocast(q.device.type):
        # The query heads of a key head stand one below the other, so that keys are not repeated.
        stacked = q.to(wide).unflatten(1, (heads, -1)).flatten(2, 3)
        scores = (stacked @ keys.to(wide).transpose(-1, -2) * scale).reshape(*q.shape[:3], keys.size(2))
        if positions is not None:
            mask = positions.unsqueeze(-1) >= torch.arange(keys.size(2), device=q.device)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask.to(wide)
        blind = (scores == float("-inf")).all(
            -1, keepdim=True
        )  # a row that sees no key: torch's result is zero
        weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        share = 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)
        weights = weights * kept(tuple(weights.shape), dropout_p, seed, q.device) * share
        out = weights.reshape(q.size(0), heads, -1, keys.size(2)) @ values.to(wide)
        return out.reshape(*q.shape[:3], values.size(3)).to(q.dtype)
