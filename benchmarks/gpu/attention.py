"""The kernels of context parallelism on a device against attention written out in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Row, Where
from benchmarks.gpu.timing import seconds_of
from parallelizer.styles.context_parallel.kernels import block_backward, block_forward, merge

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BOUNDS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 3e-3}
"""Relative errors by norm; float32 may be multiplied as TF32."""


def blocks(where: Where) -> Iterator[Row]:
    """Outputs, log-sum-exp and gradients of one block, and of two merged ones, over dtypes, head sizes, groups and masks."""
    rows = 64 if where.small else 512
    heads, sizes = (2, (16, 40)) if where.small else (8, (64, 80, 96, 128, 192, 256))
    for dtype, size, groups, kind in itertools.product(
        DTYPES, sizes, (1, 4), ("full", "causal", "mask", "empty row")
    ):
        yield _compared(
            where.device, dtype, heads * groups if where.small else heads, groups, rows, size, kind
        )


def _compared(device: str, dtype: str, heads: int, groups: int, rows: int, size: int, kind: str) -> Row:
    torch.manual_seed(0)
    kept: dict[str, Any] = {"device": device, "dtype": DTYPES[dtype]}
    # As a projection gives them: [B, S, H, D], transposed.
    q = torch.randn(2, rows, heads, size, **kept).transpose(1, 2)
    k, v = (torch.randn(2, rows, heads // groups, size, **kept).transpose(1, 2) for _ in range(2))
    grad = torch.randn(2, rows, heads, size, **kept).transpose(1, 2)
    mask = None
    if kind in ("mask", "empty row"):
        mask = torch.rand(2, 1, rows, rows, device=device) < 0.5
        mask[..., 0] = True
        if kind == "empty row":
            mask[:, :, 3] = False
    causal, scale = kind == "causal", size**-0.5
    found: Row = {"dtype": dtype, "head": size, "groups": groups, "kind": kind}
    try:
        out, lse = block_forward(q, k, v, is_causal=causal, scale=scale, mask=mask)
        grads = block_backward(grad, q, k, v, out, lse, is_causal=causal, scale=scale, mask=mask)
    except Exception as error:  # a row of the table, and not the end of it
        return found | {"worst": f"{type(error).__name__}: {str(error)[:120]}", "within": False}
    wide = [t.double().detach().requires_grad_() for t in (q, k, v)]
    right, right_lse = written_out(*wide, causal, scale, mask)
    (right * grad.double()).sum().backward()
    half = rows // 2
    seen = mask if mask is None else (mask[..., :half], mask[..., half:])
    pairs = [(out, right), (lse, right_lse), *zip(grads, (t.grad for t in wide), strict=True)]
    if not causal:
        parts = [
            block_forward(
                q,
                k[:, :, s],
                v[:, :, s],
                is_causal=False,
                scale=scale,
                mask=None if seen is None else seen[i],
            )
            for i, s in enumerate((slice(0, half), slice(half, None)))
        ]
        both, both_lse = merge(*parts[0], *parts[1])
        pairs += [(both, right), (both_lse, right_lse)]
    worst = max(error_of(a, b) for a, b in pairs)
    return found | {"worst": f"{worst:.1e}", "within": worst <= BOUNDS[dtype]}


def written_out(
    q: Any, k: Any, v: Any, causal: bool, scale: float, mask: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in single operators, in the dtype of q."""
    groups = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1))
    return weights @ v, lse


def error_of(found: torch.Tensor, right: Any) -> float:
    """By norm; infinite where the two are not infinite at the same places."""
    found, right = found.double(), right.double()
    if bool((found.isinf() != right.isinf()).any()):
        return float("inf")
    found, right = (t.masked_fill(right.isinf(), 0) for t in (found, right))
    return (
        float((found - right).norm() / right.norm().clamp(min=1e-30))
        if bool(found.isfinite().all())
        else float("inf")
    )


def chosen(where: Where) -> Iterator[Row]:
    """Which kernels torch's own attention takes, by dtype, head size, mask and groups."""
    from torch.profiler import ProfilerActivity, profile

    rows = 64 if where.small else 2048
    kinds = ("full", "causal", "mask")
    for dtype, size, groups, kind in itertools.product(DTYPES, (64, 128, 192, 256), (1, 4), kinds):
        q = torch.randn(1, 8, rows, size, device=where.device, dtype=DTYPES[dtype], requires_grad=True)
        k, v = (
            torch.randn(
                1, 8 // groups, rows, size, device=where.device, dtype=DTYPES[dtype], requires_grad=True
            )
            for _ in range(2)
        )
        mask = (
            torch.ones(1, 1, rows, rows, dtype=torch.bool, device=where.device).tril()
            if kind == "mask"
            else None
        )
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=kind == "causal", enable_gqa=groups > 1
            )
            out.sum().backward()
        names = sorted(
            {
                e.name.removeprefix("aten::")
                for e in seen.events()
                if e.name.startswith(
                    ("aten::_scaled_dot", "aten::_flash", "aten::_cudnn", "aten::_efficient")
                )
            }
        )
        yield {
            "dtype": dtype,
            "head": size,
            "groups": groups,
            "kind": kind,
            "operators": ", ".join(n for n in names if n.startswith("_scaled_dot")),
        }


def times(where: Where) -> Iterator[Row]:
    """Milliseconds of forward and backward: the block kernel of context parallelism beside torch's own choice."""
    lengths = (256,) if where.small else (8192, 32768, 131072)
    for rows in lengths:
        dtype = torch.float32 if where.device == "cpu" else torch.bfloat16
        q = torch.randn(1, 2 if where.small else 32, rows, 128, device=where.device, dtype=dtype)
        k, v = (
            torch.randn(1, 2 if where.small else 8, rows, 128, device=where.device, dtype=dtype)
            for _ in range(2)
        )
        grad = torch.randn_like(q)
        repeats = 3 if rows > 40000 else 10

        def block() -> None:
            out, lse = block_forward(q, k, v, is_causal=True, scale=128**-0.5)  # noqa: B023
            block_backward(grad, q, k, v, out, lse, is_causal=True, scale=128**-0.5)  # noqa: B023

        leaves = [t.clone().requires_grad_() for t in (q, k, v)]

        def usual() -> None:
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(*leaves, is_causal=True, enable_gqa=True).backward(grad)  # noqa: B023

        work = 3.5 * 4 * q.size(1) * rows * rows * 128 / 2
        for name, call in (("block", block), ("torch's choice", usual)):
            seconds = seconds_of(call, where.device, repeats)
            yield {
                "rows": rows,
                "kernel": name,
                "ms": round(seconds * 1e3, 2),
                "TFLOP/s": round(work / seconds / 1e12, 1),
            }


CASES = (
    Case("attention blocks", blocks, limit=240),
    Case("attention chosen", chosen),
    Case("attention times", times),
)
