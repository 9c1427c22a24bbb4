"""Attention over one block of queries and keys, with the log-sum-exp that lets blocks be merged.

The kernel is chosen by the tensors' device and dtype, never by a process-wide setting. All of them take
q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] with H a multiple of Hkv (query head h reads key head
h // (H // Hkv)); heads of k and v are not expanded. The log-sum-exp `lse` is natural, [B, H, Sq], in the
accumulation dtype. A causal block is square. A `mask` [B or 1, H or 1, Sq or 1, Sk] is boolean (true where attention is
paid) or added to the scores, and gets no gradient; a row that it masks wholly has out 0 and lse -inf. No dropout.
"""

from __future__ import annotations

import contextlib
from typing import Literal

import torch

from parallelizer import torch_private
from parallelizer.styles.context_parallel import efficient

Tensor = torch.Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over this dtype are made in: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v and the log-sum-exp of each row.

    Returns out [B, H, Sq, Dv] in q's dtype and lse [B, H, Sq] in the accumulation dtype.
    """
    q, k, v = _readable(q), _readable(k), _readable(v)
    kernel = _kernel(q, v, mask)
    if kernel == "plain":
        return _plain_forward(q, k, v, is_causal, scale, mask)
    if kernel == "cudnn":
        return torch_private.cudnn_attention(q, k, v, is_causal, scale)
    if kernel == "flash":
        return torch_private.flash_attention_cuda(q, k, v, is_causal, scale)
    added = None if mask is None else added_to_scores(mask, q.dtype)
    if kernel == "cpu":
        out, lse = torch_private.flash_attention_cpu(q, k, v, is_causal, scale, added)
    else:
        out, lse = efficient.forward(q, k, v, is_causal, scale, added)
    if added is None:
        return out, lse
    # Of a row that sees nothing a kernel says 0, or no number.
    empty = (added == float("-inf")).all(-1).expand(lse.shape)
    if kernel != "cpu":
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)
    return out, lse.masked_fill(empty, float("-inf"))


def block_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of q, k and v, each in its tensor's dtype and shape.

    `out` and `lse` belong to the rows' whole attention: those of `block_forward` if this block is all that
    the rows see, the merged ones if it is one of several; then the shares of all blocks add up to the
    gradient.
    """
    grad_out, q, k, v, out = (_readable(t) for t in (grad_out, q, k, v, out))
    if mask is not None:
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # exp(-inf - 0) is 0, exp(-inf + inf) is no number
    kernel = _kernel(q, v, mask)
    if kernel == "plain":
        return _plain_backward(grad_out, q, k, v, out, lse, is_causal, scale, mask)
    # CUDA's kernels read lse as contiguous, whatever its strides say.
    if kernel == "cudnn":
        if grad_out.stride() != out.stride():
            grad_out = torch.empty_like(out).copy_(grad_out)
        return torch_private.cudnn_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), is_causal, scale
        )
    if kernel == "flash":
        return torch_private.flash_attention_cuda_backward(
            grad_out, q, k, v, out, lse.contiguous(), is_causal, scale
        )
    added = None if mask is None else added_to_scores(mask, q.dtype)
    if kernel == "cpu":
        return torch_private.flash_attention_cpu_backward(
            grad_out, q, k, v, out, lse, is_causal, scale, added
        )
    return efficient.backward(grad_out, q, k, v, out, lse, is_causal, scale, added)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys, from the attention over each.

    Both results are in lse's dtype, so that merging many blocks rounds once, at the caller. Rows that see no
    key on one side (lse -inf, out finite) are right; on both sides lse stays -inf and out finite.
    """
    # From the difference, not from the merged lse: the two weights add up to 1 however large the scores are.
    difference = (lse_b - lse_a).masked_fill(lse_a == lse_b, 0.0)  # -inf - -inf would be nan
    weight_a = torch.sigmoid(-difference).unsqueeze(-1)
    weight_b = torch.sigmoid(difference).unsqueeze(-1)
    out = weight_a * out_a.to(lse_a.dtype) + weight_b * out_b.to(lse_b.dtype)
    return out, torch.logaddexp(lse_a, lse_b)


def _readable(tensor: Tensor) -> Tensor:
    """With its last dimension dense, as fused kernels need; gradients often come expanded from a scalar."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def masks_fused(q: Tensor, v: Tensor) -> bool:
    """Whether a block under a mask has a kernel that does not hold the matrix of scores."""
    return _masked_kernel(q, v) != "plain"


Kernel = Literal["cpu", "cudnn", "flash", "efficient", "plain"]

_HALF = (torch.float16, torch.bfloat16)


def _kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> Kernel:
    """The kernel for a block: the fastest that takes it, and `plain` for what none takes."""
    if mask is not None:
        return _masked_kernel(q, v)
    if q.dtype in _HALF and q.size(-1) % 8 == 0 and v.size(-1) % 8 == 0:
        largest = max(q.size(-1), v.size(-1))
        if q.device.type != "cuda":  # the CPU's stores what CUDA's do
            return "cpu" if largest <= 256 and q.size(-1) == v.size(-1) else _masked_kernel(q, v)
        generation = _generation(q.device)
        # As long as torch's own choice on Hopper takes it, it is 1.6 to 1.8 times as fast as FlashAttention 2 (docs/gpu.md).
        if generation == (9, 0) and largest <= 256 and torch.backends.cudnn.is_available():
            return "cudnn"
        if generation >= (8, 0) and largest <= 256 and q.size(-1) == v.size(-1):
            return "flash"
    return _masked_kernel(q, v)


def takes_flash(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention takes queries and values for sequences of several lengths. Of tensors without values only the dtype
    and the sizes are asked: a plan in 16 bits is one for CUDA.
    """
    if q.dtype not in _HALF or q.size(-1) != v.size(-1) or q.size(-1) % 8 or q.size(-1) > 256:
        return False
    return not torch_private.has_values(q) or (q.device.type == "cuda" and _generation(q.device) >= (8, 0))


def _masked_kernel(q: Tensor, v: Tensor) -> Kernel:
    """The kernel for a block under a mask, of any dtype."""
    if efficient.takes(q, v):
        return "efficient"
    # Meta tensors take the CPU's: the same shapes as any other kernel, without a matrix of scores.
    return "cpu" if q.device.type in ("cpu", "meta") and q.size(-1) == v.size(-1) else "plain"


def _generation(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device. A fake tensor on a machine without one is planned for Hopper."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """In tensor operations, on any device, in the accumulation dtype; holds the whole matrix of scores."""
    with no_autocast(q.device.type):
        wide = accumulation_dtype(q.dtype)
        scores = _scores(q.to(wide), k.to(wide), is_causal, scale, mask)
        lse = torch.logsumexp(scores, dim=-1)
        norm = lse if mask is None else lse.masked_fill(lse == float("-inf"), 0.0)
        out = _of_heads(torch.exp(scores - norm.unsqueeze(-1)) @ v.to(wide), q)
        return out.to(q.dtype), _of_heads(lse.unsqueeze(-1), q).squeeze(-1)


def _plain_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    with no_autocast(q.device.type):
        wide = accumulation_dtype(q.dtype)
        heads = k.size(1)
        queries, keys, values = _by_kv_head(q.to(wide), heads), k.to(wide), v.to(wide)
        grad, norm = _by_kv_head(grad_out.to(wide), heads), _by_kv_head(lse.unsqueeze(-1), heads)
        # One number per row stands for the gradient through the softmax's denominator.
        delta = (grad * _by_kv_head(out.to(wide), heads)).sum(dim=-1, keepdim=True)
        weights = torch.exp(_scores(q.to(wide), keys, is_causal, scale, mask) - norm)
        grad_scores = weights * (grad @ values.transpose(-1, -2) - delta) * scale
        grad_q = _of_heads(grad_scores @ keys, q)
        grad_k = grad_scores.transpose(-1, -2) @ queries
        grad_v = weights.transpose(-1, -2) @ grad
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    """[B, Hkv, G * Sq, Sk], the G query heads that share a key head one below the other."""
    scores = _by_kv_head(q, k.size(1)) @ k.transpose(-1, -2) * scale
    if is_causal:
        rows = torch.arange(q.size(2), device=q.device).repeat(q.size(1) // k.size(1)).unsqueeze(-1)
        later = torch.arange(k.size(2), device=q.device) > rows
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        added = added_to_scores(mask, q.dtype).expand(-1, q.size(1), q.size(2), -1)
        scores = scores + _by_kv_head(added, k.size(1))
    return scores


def added_to_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as it is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _by_kv_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """[B, H, Sq, X] to [B, Hkv, G * Sq, X]: queries are stacked, where keys would have to be repeated."""
    return tensor.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _of_heads(tensor: Tensor, q: Tensor) -> Tensor:
    """Undoes `_by_kv_head`."""
    return tensor.unflatten(2, (-1, q.size(2))).flatten(1, 2)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """The dtypes here are chosen; autocast would multiply in bf16 what was lifted to float32."""
    if has_autocast(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def as_autocast(tensor: Tensor) -> Tensor:
    """In the dtype that autocast gives the arguments of torch's attention."""
    device = tensor.device.type
    if not has_autocast(device) or not torch.is_autocast_enabled(device):
        return tensor
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(device))


@torch.compiler.assume_constant_result  # torch 2.11 cannot compile the question, and would break the graph
def has_autocast(device_type: str) -> bool:
    """Whether autocast knows this type of device."""
    return torch.amp.is_autocast_available(device_type)
