"""Attention kernels with their log-sum-exp. See `parallelizer.torch_private`."""

from __future__ import annotations

import types
from typing import Any

import torch


# Attention that also returns its log-sum-exp, and its backward from a given log-sum-exp. Context
# parallelism merges blocks by it. Waits for a public attention function with `return_lse` that runs, and
# differentiates, on CPU: `flex_attention` returns one but refuses its backward there. Shapes and meaning:
# parallelizer/styles/context_parallel/kernels.py.
def flash_attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the fused CPU kernel: any float dtype, grouped heads, equal head sizes; a mask of q's dtype is added."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def flash_attention_cpu_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return op(grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)


def flash_attention_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by FlashAttention: float16 or bfloat16, grouped heads, head size a multiple of 8."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    out, lse, *_ = op(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse


def flash_attention_cuda_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    # The state of the random numbers of the forward's dropout: there was none, so its content is not read.
    # The lengths of packed sequences are None, as the forward returns them for dense ones.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    lengths = (q.size(2), k.size(2))
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    return op(grad_out, q, k, v, out, lse, None, None, *lengths, 0.0, is_causal, seed, offset, scale=scale)


# FlashAttention over sequences of several lengths, one after another. The public `torch.nn.attention.varlen.varlen_attn` calls
# the same operators, and keeps its copies of keys and values for backward: of each layer. Its parameters changed between torch
# 2.10 and 2.13; those of the operators that are given here did not.
def flash_attention_of_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_begins: torch.Tensor,
    key_begins: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse [heads, queries]; see parallelizer/styles/context_parallel/varlen.py. Begins are int32, with the end of the
    last sequence; `longest` are the most queries and the most keys of a sequence. With fewer queries than keys, the causal mask
    lets the last query see all keys.
    """
    op = torch.ops.aten._flash_attention_forward.default
    out, lse, *_ = op(q, k, v, query_begins, key_begins, *longest, 0.0, True, False, scale=scale)
    return out, lse


def flash_attention_of_sequences_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query_begins: torch.Tensor,
    key_begins: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    # There was no dropout, so that the state of its random numbers is not read.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty(0, device=q.device)
    op = torch.ops.aten._flash_attention_backward.default
    given = (grad_out, q, k, v, out, lse, query_begins, key_begins, *longest)
    return op(*given, 0.0, True, seed, offset, scale=scale)


def attention_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention with grouped heads in single operators, as torch's attention falls back to where no kernel fits. The
    public way is a choice of backends for a whole process or thread, which a model may have made for itself.
    """
    op = torch.ops.aten._scaled_dot_product_attention_math.default
    out: torch.Tensor = op(q, k, v, mask, 0.0, is_causal, None, scale=scale, enable_gqa=True)[0]
    return out


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by cuDNN, which torch itself prefers on Hopper: float16 or bfloat16, grouped heads, any size of v's heads."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = op(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse.squeeze(-1)


def cudnn_attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v. `grad_out` has the strides of `out`, or torch copies it with a warning."""
    # There was no dropout, so that the state of its random numbers is not read.
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    lengths = (q.size(2), k.size(2))
    given = (grad_out, q, k, v, out, lse.unsqueeze(-1), seed, offset, None, None, None, *lengths)
    return op(*given, 0.0, is_causal, scale=scale)


_LSE_ROWS = 32
"""The memory-efficient kernels keep the log-sum-exp of a multiple of so many rows."""


def efficient_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the memory-efficient kernels of CUDA in float32: one key head for each query head, a float32 bias that is
    added to the scores.
    """
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse, *_ = op(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    return out, lse[:, :, : q.size(2)]


def efficient_attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % _LSE_ROWS), value=float("inf")).contiguous()
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, False]
    return op(grad_out, q, k, v, bias, out, lse, seed, offset, 0.0, wanted, is_causal, scale=scale)[:3]


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward` without its own check for overrides.

    torch takes a function mode off while it handles a call, so that a mode never sees the attention call
    inside this function; put on again, it would be asked about the same function for ever.
    `nn.MultiheadAttention` is built on it, and context parallelism must see inside. Waits for a mode that can
    step into a function.
    """
    function = torch.nn.functional.multi_head_attention_forward
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    unchecked = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    unchecked.__kwdefaults__ = function.__kwdefaults__
    return unchecked(*args, **kwargs)
