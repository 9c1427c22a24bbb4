"""Attention as a step on CUDA would choose it, in a step that is followed on fake tensors of the CPU.

`F.scaled_dot_product_attention` chooses its kernel by the device. In 16 bits CUDA has fused kernels for grouped heads and masks,
which store queries, keys, values, the result and its log-sum-exp; the CPU of torch 2.11 writes grouped heads out, with all
scores. In float32 it is the other way around: CUDA writes grouped heads out. Seen on an H100: docs/gpu.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.styles.context_parallel.document_mask import DocumentMask
from parallelizer.styles.context_parallel.kernels import added_to_scores

HALF = (torch.float16, torch.bfloat16)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes attention, and stores what the kernels of CUDA store. Dropout and DTensors are left to torch."""
    q, k, v = query, key, value
    rest: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    plain = not any(isinstance(t, DTensor) for t in (q, k, v)) and not dropout_p and q.ndim == 4
    if (
        not plain
        or isinstance(attn_mask, DocumentMask)
        or q.dtype not in (*HALF, torch.float32)
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, **rest)
    added = None if attn_mask is None else added_to_scores(attn_mask, q.dtype)
    if q.dtype == torch.float32 and q.size(1) != k.size(1):
        return torch_private.attention_written_out(q, k, v, added, is_causal, scale)
    if q.size(-1) != v.size(-1):  # no fused kernel of the CPU has the shapes
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, **rest)
    return _Fused.apply(q, k, v, added, is_causal, q.size(-1) ** -0.5 if scale is None else scale)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        out, lse = torch_private.flash_attention_cpu(q, k, v, causal, scale, mask)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.options = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, out, lse, mask = ctx.saved_tensors
        causal, scale = ctx.options
        grad = gradients[0]
        found = torch_private.flash_attention_cpu_backward(grad, q, k, v, out, lse, causal, scale, mask)
        return (*found, None, None, None)
