"""The attention that transformers models call by our name: transformers' own call of scaled_dot_product_attention,
and the scores written out where a model caps them or has attention sinks, which that function cannot.
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

    The result is [batch, rows, heads, size], as transformers wants it. `s_aux` are attention sinks [heads].
    """
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    if softcap is not None or sinks is not None:
        return _written_out(module, query, key, value, attention_mask, scaling, dropout, softcap, sinks), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def _written_out(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(q k^T * scale) v. With `softcap`, the scores are cap * tanh(q k^T * scale / cap), as in Gemma 2
    (arXiv:2408.00118, section 2). With `sinks` [heads], each row has one more score of its head, and no value for it.
    """
    key, value = (whole_rows(t, 2) for t in (key, value))
    groups = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-2, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
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
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat([scores, sink], dim=-1)
    shares = scores.softmax(-1)
    if sinks is not None:
        shares = shares[..., :-1]
    weights = nn.functional.dropout(shares, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous()
