"""Masks of transformers models whose sequence is dealt out over ranks.

A transformers model makes its masks from the length of what it is given. Under context parallelism that is a rank's
part of the sequence, and every mask would be wrong: a window would be an eighth of the sequence against the same eighth,
and a jump in dealt-out positions would be taken for the beginning of another document. So the model says by
`attn_implementation` that its masks come from here; what it wants (causal, a window, chunks, padding) comes as a function
of positions, and is asked for this rank's rows against all columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer.styles.context_parallel.sequence import CurrentOrder

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Here:
    """The parallel model whose forward runs: how its sequence lies, and the padding mask that it was given by us.

    `rows` are this rank's of the sequence, which `stream_ranks` may share out between them outside of attention.
    """

    sequence: CurrentOrder
    rank: int
    rows: int
    stream_ranks: int
    marker: Tensor | None

    @property
    def whole(self) -> int:
        """The length of the whole sequence."""
        order = self.sequence.order
        return self.rows * order.ranks if order.length is None else order.length


_here: _Here | None = None
# A plain global: a checkpoint's recomputation may run in a thread of its own, and masks are made outside of it.


def follow(
    model: nn.Module, sequence: CurrentOrder, rank: int, stream_ranks: int, *, positions_made: bool = True
) -> None:
    """From now on let the masks of this transformers model know how its sequence was dealt out.

    A model that is given no `attention_mask` gets one of ones, one column for each token of the whole sequence: it says
    how many keys there are, and keeps transformers from guessing documents from positions. Where a rank has all tokens,
    and its positions are the batch's own, not ours (`positions_made`), it may guess.
    """
    signature = inspect.signature(model.forward)

    def enter(
        model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        global _here
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
        given = bound | bound.get("kwargs", {})
        tokens = _tokens(given)
        if tokens is None:  # its inputs are no tokens: nothing says how long a sequence is
            return args, kwargs
        marker = None
        rows = tokens.size(1)
        guessing = sequence.order.ranks == 1 and not positions_made and given.get("position_ids") is not None
        if given.get("attention_mask") is None and not guessing:
            whole = _Here(sequence, rank, rows, stream_ranks, None).whole
            marker = torch.ones(tokens.size(0), whole, dtype=torch.bool, device=tokens.device)
            args, kwargs = _with_mask(signature, args, kwargs, marker)
        _here = _Here(sequence, rank, rows, stream_ranks, marker)
        return args, kwargs

    def leave(*_: Any) -> None:
        global _here
        _here = None

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)


_OF_ONES = "_parallelizer_of_ones"


def of_ones(tokens: Tensor) -> Tensor:
    """A mask of no padding for tokens on meta, where its values could not say so: `mask` knows it again."""
    made = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
    setattr(made, _OF_ONES, True)
    return made


def _is_of_ones(mask: Tensor) -> bool:
    return getattr(mask, _OF_ONES, False)


def _with_mask(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a mask, also where None was passed by its place."""
    place = list(signature.parameters).index("attention_mask")
    if place < len(args):
        return (*args[:place], mask, *args[place + 1 :]), kwargs
    return args, {**kwargs, "attention_mask": mask}


def _tokens(given: dict[str, Any]) -> Tensor | None:
    """The tokens, or what they are embedded as; None for a model of other inputs."""
    return next(
        (t for name in ("input_ids", "inputs_embeds") if isinstance(t := given.get(name), Tensor)), None
    )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Who sees whom, bool [batch, 1, rows, keys], or None where `is_causal` says all, or everybody sees everybody.

    The parameters are those that transformers gives every mask function. Raises ValueError for a mask that a part of the
    sequence cannot have.
    """
    from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function, sdpa_mask

    here = _here
    if written_out(kwargs.get("config")):
        allow_is_causal_skip = allow_is_bidirectional_skip = False
    function: Callable[..., Any] = mask_function or causal_mask_function
    if attention_mask is not None and (
        _is_of_ones(attention_mask) or (here and attention_mask is here.marker)
    ):
        attention_mask = None
    padding = attention_mask is not None
    if attention_mask is not None and attention_mask.is_meta:
        attention_mask = None
    if here is not None:
        if here.sequence.order.ranks == 1 and attention_mask is None:
            kv_length = here.rows  # nothing said so, and the model took what is left of its stream
        _check(here, q_length, kv_length)
        q_length = here.rows  # of a stream that is split over tp too, attention sees all rows
    if here is None and torch.device(device).type == "meta":
        # No values: a shape will do, and whoever watches for positions that a model counts must not see ours.
        narrow = local_size is not None and kv_length >= local_size
        skipped = not (narrow or padding) and (allow_is_causal_skip or allow_is_bidirectional_skip)
        return (
            None
            if skipped
            else torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
        )
    if here is None or here.sequence.order.ranks == 1:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset,
            mask_function=function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device, **kwargs,
        )  # fmt: skip
    narrow = local_size is not None and here.whole >= local_size
    if attention_mask is None and not narrow and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return None
    if attention_mask is not None:
        function = and_masks(function, padding_mask_function(attention_mask.bool()))
    order = here.sequence.order
    mine = order.positions(here.rows * order.ranks, here.rank, torch.device(device))
    batch = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    rows = mine.view(-1, 1, here.rows, 1)
    columns = torch.arange(here.whole, device=device).view(1, 1, 1, -1)
    return function(batch, head, rows, columns).expand(batch_size, 1, here.rows, here.whole)


def _check(here: _Here, rows: int, columns: int) -> None:
    if columns != here.whole or rows * here.stream_ranks not in (here.rows, here.rows * here.stream_ranks):
        raise ValueError(
            f"a mask of {rows} x {columns} was asked for, and this rank has {here.rows} rows of a sequence of {here.whole}: "
            "attention_mask must be of the whole sequence, left out of the plan's buffers"
        )


SINKS = frozenset({"flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
"""The `model_type` of models with attention sinks whose attention is otherwise that of all models. Those of deepseek_v4 and hy_v4
choose keys too, or compress them.
"""


def written_out(config: Any) -> bool:
    """Whether scaled_dot_product_attention cannot compute a model's attention, and ours writes it out: a model that caps its
    scores, or one with attention sinks.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return capped or getattr(config, "model_type", None) in SINKS
