"""Function modes for proofs: everything in float64, attention written out, sums in another order."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask
from torch.overrides import TorchFunctionMode

from parallelizer.compiler.observe import phase
from parallelizer.compiler.observe.function_mode import FunctionMode
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.proof.dropout import NO_RANDOM_NUMBERS
from parallelizer.torch_private import NOT_FLEX, FlexAnswer, FlexCall, FlexCalls, is_grouped_mm

_FLOAT8 = ("torchao.float8", "parallelizer.styles.float8.grouped", "parallelizer.proof.float8_reference")

_LOW = (torch.float32, torch.bfloat16, torch.float16)


class Float64(FunctionMode):
    """Lifts explicit casts to a narrower float to float64: models that upcast norms, rotary tables or losses
    to float32 otherwise prove nothing below 1e-7.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_dynamo_compiling() and _rounds_to_float8():
            return super().call(func, args, kwargs)
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        if is_grouped_mm(func) and args[0].dtype == torch.float64:  # which no kernel takes
            return grouped_products(*args, **kwargs)
        # A fused optimizer counts its steps in a float32, and its CUDA kernel reads nothing else.
        counter = func is torch.zeros and phase.current() == "optimizer"
        if kwargs.get("dtype") in _LOW and not counter:
            kwargs["dtype"] = torch.float64
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _LOW else a for a in args)
        return super().call(func, args, kwargs)


def grouped_products(
    rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """As torch documents `grouped_mm` of rows [S, K] in groups that end at `offs` [G], with weights [G, K, N]: [S, N]. Rows
    behind the last group give zeros.
    """
    ends = offs.tolist()
    parts = [rows[begin:end] @ weight for begin, end, weight in zip([0, *ends], ends, weights, strict=False)]
    parts.append(rows.new_zeros(len(rows) - ends[-1], weights.size(2)))
    found = torch.cat(parts)
    return found if bias is None else found + bias


def _rounds_to_float8() -> bool:
    """Whether a call comes from the arithmetic of float8, whose scales are in float32 by definition."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_a_mode(frame):
        frame = frame.f_back
    caller = "" if frame is None else frame.f_globals.get("__name__", "")
    return caller.startswith(_FLOAT8)


def _is_of_a_mode(frame: FrameType) -> bool:
    """Whether a frame passes a call on, in this mode or in one that a style puts around a forward."""
    if frame.f_globals.get("__name__") == "torch.overrides":
        return True
    is_method = frame.f_code.co_varnames[:1] == ("self",)
    return is_method and isinstance(frame.f_locals.get("self"), TorchFunctionMode)


class PlainAttention(FunctionMode):
    """Attention written out: softmax(q k^T / sqrt(d)) v, so that no backend is compared with itself. That of
    `flex_attention` too, which has no backward on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flex = FlexCalls(plain_flex_attention)

    def __exit__(self, *error: Any) -> None:
        self.flex.close()
        super().__exit__(*error)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            return plain_attention(*args, **kwargs)
        if (answer := self.flex(func, args, kwargs)) is not NOT_FLEX:
            return answer
        return super().call(func, args, kwargs)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch documents `scaled_dot_product_attention`; [..., heads, rows, size]."""
    if dropout_p:
        message = f"the unsharded run draws random numbers: attention has a dropout of {dropout_p:g}"
        raise PlanError([Diagnostic("model-failed", message, None, NO_RANDOM_NUMBERS)])
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        )
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - torch.where(top.isfinite(), top, 0)).exp()
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / torch.where(total > 0, total, 1)) @ value  # a row that may see nothing gets zeros


def plain_flex_attention(call: FlexCall) -> FlexAnswer:
    """As torch documents `flex_attention`, from the functions alone: blocks only say what need not be computed."""
    query, (key, value), score_mod = call.query, (call.key, call.value), call.score_mod
    groups = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * call.scale
    batch, heads, rows, keys = scores.shape

    def of_pairs(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        # Asks a function of four indices for every pair, whatever it returns.
        return create_mask(function, batch, heads, rows, keys, device=scores.device)

    if score_mod is not None:
        before, change = scores, score_mod
        scores = of_pairs(lambda b, h, i, j: change(before[b, h, i, j], b, h, i, j))
    if call.block_mask is not None:
        scores = scores.masked_fill(~of_pairs(call.block_mask.mask_mod), -math.inf)
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - torch.where(top.isfinite(), top, 0)).exp()
    total = weights.sum(dim=-1, keepdim=True)
    out = (weights / torch.where(total > 0, total, 1)) @ value
    lse = torch.where(total > 0, top + torch.where(total > 0, total, 1).log(), -math.inf)
    return FlexAnswer(out, lse.squeeze(-1), top.squeeze(-1))


class OtherOrder(FunctionMode):
    """Every linear sums its inputs in two halves, the second first: a change of rounding and of nothing
    else.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.linear and not kwargs and args[0].size(-1) > 1:
            x, weight, *bias = args
            half = x.size(-1) // 2
            y = F.linear(x[..., half:], weight[:, half:]) + F.linear(x[..., :half], weight[:, :half])
            return y + bias[0] if bias and bias[0] is not None else y
        return super().call(func, args, kwargs)
