"""Blocks of attention by CUDA's memory-efficient kernels, which take masks and float32 and hold no matrix of scores.

They are run in float32 whatever the dtype: on an H100 under torch 2.11 they were right in float32, to 9e-7, and wrong in 16
bits under a mask (docs/gpu.md). They want one key head for each query head, and rows of a mask that begin at multiples of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import pad

from parallelizer import torch_private

Tensor = torch.Tensor

_planned = False
"""A plain value, which compiled code can read."""


@contextmanager
def planned() -> Iterator[None]:
    """Inside, blocks on a CPU are computed as on CUDA, with the CPU's kernel in the place of CUDA's. It is for a step that is
    followed on a CPU: the copies in float32 and the bias take more memory than anything else of a masked block.
    """
    global _planned
    before, _planned = _planned, True
    try:
        yield
    finally:
        _planned = before


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels take such queries and values."""
    # A torch that was built without CUDA does not even know the shapes of their results.
    on_cuda = q.device.type == "cuda" and torch.backends.cuda.is_built()
    return (
        (on_cuda or (_planned and q.size(-1) == v.size(-1)))  # the CPU's kernel takes one head size
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and q.size(-1) % 4 == 0
        and v.size(-1) % 4 == 0
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out [B, H, Sq, Dv] in q's dtype and lse [B, H, Sq] in float32. `added` is a mask that is added to the scores, [B or 1,
    H or 1, Sq or 1, Sk]; of a row that it masks wholly out and lse may be any number, or none.
    """
    cpu, cuda = torch_private.flash_attention_cpu, torch_private.efficient_attention
    out, lse = (cpu if _planned else cuda)(
        q.float(), _for_each_head(q, k), _for_each_head(q, v), is_causal, scale, _bias(added, q, k)
    )
    return out.to(q.dtype), lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    added: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each in its dtype. lse is finite everywhere."""
    heads = _for_each_head(q, k), _for_each_head(q, v)
    cpu, cuda = torch_private.flash_attention_cpu_backward, torch_private.efficient_attention_backward
    grad_q, grad_k, grad_v = (cpu if _planned else cuda)(
        grad_out.float(), q.float(), *heads, out.float(), lse, is_causal, scale, _bias(added, q, k)
    )
    return grad_q.to(q.dtype), _of_own_heads(grad_k, k), _of_own_heads(grad_v, v)


def _for_each_head(q: Tensor, k: Tensor) -> Tensor:
    k = k.float()
    return k if k.size(1) == q.size(1) else k.repeat_interleave(q.size(1) // k.size(1), dim=1)


def _of_own_heads(grad: Tensor, k: Tensor) -> Tensor:
    summed = grad if grad.size(1) == k.size(1) else grad.unflatten(1, (k.size(1), -1)).sum(2)
    return summed.to(k.dtype)


def _bias(added: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if added is None:
        return None
    keys = k.size(2)
    padded = pad(added.float().expand(-1, -1, -1, keys), (0, -keys % 16))[..., :keys]
    return padded.expand(q.size(0), q.size(1), q.size(2), keys)
