"""An attention written from its definition, that shares nothing with the code under test."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp in float64, differentiable; grouped heads repeated, scores in full."""
    group = q.size(1) // k.size(1)
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), keys) * scale
    if is_causal:
        seen = torch.arange(k.size(2)).unsqueeze(0) <= torch.arange(q.size(2)).unsqueeze(1)
        scores = torch.where(seen, scores, -torch.inf)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), values), scores.logsumexp(dim=-1)


def relative_error(value: Tensor, expected: Tensor) -> float:
    """By the Frobenius norm, in float64; shapes must agree."""
    if value.shape != expected.shape:
        raise AssertionError(f"{tuple(value.shape)} is not {tuple(expected.shape)}")
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """As `plain_attention`, under a mask of the whole sequence, boolean or added."""
    scores = masked_scores(q, k, mask=mask, is_causal=is_causal, scale=scale)
    return scores.softmax(dim=-1) @ v.repeat_interleave(q.size(1) // k.size(1), dim=1)


def masked_scores(q: Tensor, k: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """What `masked_attention` takes the softmax of; its logsumexp is the log-sum-exp."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(q.size(1) // k.size(1), dim=1)) * scale
    if is_causal:
        scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores
