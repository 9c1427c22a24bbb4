"""Attention of packed documents without a mask, on a device, against attention under their mask in float64; its memory and time.

Every row is one rank's attention of a sequence of documents that cp deals out per document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.attention import BOUNDS, DTYPES, error_of, written_out
from benchmarks.gpu.cases import Case, Row, Where
from benchmarks.gpu.timing import seconds_of
from parallelizer.styles.context_parallel.dealing import document_mask, per_document
from parallelizer.styles.context_parallel.document_mask import dense, made
from parallelizer.styles.context_parallel.kernels import takes_flash
from parallelizer.styles.context_parallel.masked import attend

Tensor = torch.Tensor


def documents(*lengths: int) -> Tensor:
    """Ids [1, S] of documents of these lengths."""
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).unsqueeze(0)


KINDS = {
    "one document": (512,),
    "uneven": (3, 130, 1, 257, 64, 57),
    "of one token": (1,) * 512,
    "a rest of single rows": (7,) * 73 + (1,),
}
"""Lengths that sum to 512. Of documents of 7 tokens on 4 ranks each rank has at most two rows, none of them in a chunk."""


def right(where: Where) -> Iterator[Row]:
    """Outputs and gradients over dtypes, head sizes, groups, documents and ranks."""
    heads, sizes, worlds = (4, (16,), (4,)) if where.small else (8, (64, 80, 128, 256), (1, 2, 4))
    for dtype, size, groups, kind, ranks in itertools.product(DTYPES, sizes, (1, 4), KINDS, worlds):
        yield _compared(where.device, dtype, heads, groups, size, kind, ranks)


def _compared(device: str, dtype: str, heads: int, groups: int, size: int, kind: str, ranks: int) -> Row:
    torch.manual_seed(0)
    ids = documents(*KINDS[kind])
    rows, order = ids.size(1), per_document(ids, ranks)
    positions = order.positions(rows, ranks - 1)
    kept: dict[str, Any] = {"device": device, "dtype": DTYPES[dtype]}
    # As projections give them, [B, S, H, D] transposed, and as a gather gives them.
    q, grad = (torch.randn(1, rows // ranks, heads, size, **kept).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, heads // groups, rows, size, **kept) for _ in range(2))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    found: Row = {"dtype": dtype, "head": size, "groups": groups, "documents": kind, "ranks": ranks}
    found["kernel"] = "varlen" if takes_flash(q, v) else "blocks"
    try:
        mask = made(ids, positions, torch.device(device))
        out = attend(*leaves, mask=mask, is_causal=False, scale=size**-0.5)
        grads = torch.autograd.grad(out, leaves, grad)
    except Exception as error:  # a row of the table, and not the end of it
        return found | {"worst": f"{type(error).__name__}: {str(error)[:120]}", "within": False}
    wide = [t.double().detach().requires_grad_() for t in (q, k, v)]
    expected, _ = written_out(*wide, False, size**-0.5, document_mask(ids, positions).to(device))
    rights = torch.autograd.grad(expected, wide, grad.double())
    # The gradient of a query that sees one key is 0, and what is found is rounding: so errors are by the largest of the three.
    largest = max(float(t.norm()) for t in rights)
    worst = error_of(out, expected)
    worst = max([worst, *(_by(largest, a, b) for a, b in zip(grads, rights, strict=True))])
    return found | {"worst": f"{worst:.1e}", "within": worst <= BOUNDS[dtype]}


def _by(norm: float, found: Tensor, expected: Tensor) -> float:
    error = float((found.double() - expected).norm()) / max(norm, 1e-30)
    return error if bool(found.isfinite().all()) else float("inf")


def times(where: Where) -> Iterator[Row]:
    """Milliseconds and allocated memory of forward and backward on one of two ranks, without a mask and under it."""
    lengths = (256,) if where.small else (8192, 32768, 131072)
    for rows in lengths:
        generator = torch.Generator().manual_seed(0)
        ends = torch.rand(1, rows, generator=generator) < (8 / rows if where.small else 1 / 1000)
        ids = ends.long().cumsum(1)
        positions = per_document(ids, 2).positions(rows, 0)
        dtype = torch.float32 if where.device == "cpu" else torch.bfloat16
        kept: dict[str, Any] = {"device": where.device, "dtype": dtype}
        q, grad = (torch.randn(1, 4 if where.small else 32, rows // 2, 128, **kept) for _ in range(2))
        k, v = (torch.randn(1, 2 if where.small else 8, rows, 128, **kept) for _ in range(2))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        for way in ("without a mask", "under the mask"):
            mask = made(ids, positions, torch.device(where.device))
            if way == "under the mask":
                if rows > 40000:  # 8 GiB, and kernels of several seconds
                    continue
                mask = dense(mask)

            def call() -> None:
                out = attend(*leaves, mask=mask, is_causal=False, scale=128**-0.5)  # noqa: B023
                torch.autograd.grad(out, leaves, grad)  # noqa: B023

            yield {
                "rows": rows,
                "documents": int(ids.max()) + 1,
                "way": way,
                "MiB": _peak(call, where.device),
                "ms": round(seconds_of(call, where.device, 3) * 1e3, 2),
                "host waits": _waits(call, where.device),
            }


def _peak(call: Any, device: str) -> int | None:
    """What a call allocates at most, beside what was there."""
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def _waits(call: Any, device: str) -> str:
    """Whether a call makes the host wait for the device, after a first call has copied what the kernels need."""
    if device == "cpu":
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error)[:80]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


CASES = (Case("packed documents right", right, limit=180), Case("packed documents times", times))
