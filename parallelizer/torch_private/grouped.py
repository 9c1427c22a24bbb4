"""Products of groups of rows, each group with a matrix of its own. See `parallelizer.torch_private`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def is_grouped_mm(function: Any) -> bool:
    """Whether a function multiplies groups of rows. Models for older versions of torch call the private one, which came first,
    and the public one calls it.
    """
    return function is not None and function in (getattr(F, "grouped_mm", None), torch._grouped_mm)


def scaled_grouped_mm(
    rows: torch.Tensor,
    weights: torch.Tensor,
    row_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    ends: torch.Tensor,
    *,
    fast: bool,
) -> torch.Tensor:
    """The products of groups in float8 by CUDA's kernel, in bfloat16. Factors are divided by the inverse of their scales.

    rows [S, K] of groups that end at `ends` [G], row-major, and weights [G, K, N], column-major, with scales [S] and [G, N]: the
    result is [S, N]. Or factors [N, S] and [S, K] with scales [G * N] and [G * K], whose groups are along the dim that is
    summed over: [G, N, K]. `fast` sums in fewer bits. `torch.nn.functional.scaled_grouped_mm` is public and has no shapes on
    fake tensors, which a dry run needs; this waits for them.
    """
    return torch._scaled_grouped_mm(
        rows, weights, row_scales, weight_scales, ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
