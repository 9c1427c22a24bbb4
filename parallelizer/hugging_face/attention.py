"""The attention that transformers models call by our name: transformers' own call of scaled_dot_product_attention,
and the scores written out where a model caps them, which that function cannot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelizer.styles.context_parallel.intercept import whole_rows

Tensor = torch.Tensor


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [batch, heads, rows, size] to key and value [batch, key heads, keys, size].

    The result is [batch, rows, heads, size], as transformers wants it. Raises ValueError for attention sinks, which
    scaled_dot_product_attention does not have.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError("attention sinks need transformers' eager attention: set model.attention=eager")
    softcap = kwargs.pop("softcap", None)
    if softcap is not None:
        return _capped(module, query, key, value, attention_mask, scaling, dropout, softcap), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def _capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float,
) -> Tensor:
    """softmax(cap * tanh(q k^T * scale / cap)) v, as in Gemma 2 (arXiv:2408.00118, section 2)."""
    key, value = (whole_rows(t, 2) for t in (key, value))
    groups = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(-2, -1) * scale / softcap) * softcap
    hidden = torch.finfo(
        scores.dtype
    ).min  # not -inf: a row that sees padding alone is no NaN, as in transformers' eager
    if mask is None:
        if getattr(module, "is_causal", True):
            allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~allowed, hidden)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, hidden)
    else:
        scores = scores + mask
    weights = nn.functional.dropout(scores.softmax(-1), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous()
