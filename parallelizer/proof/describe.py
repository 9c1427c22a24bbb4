"""What the difference between two tensors looks like, in words."""

from __future__ import annotations

import itertools
import math

import torch

from parallelizer.language.plan import BATCH_AXES, DATA_AXES, Mesh

PROPORTIONAL = 1e-9
"""Relative error below which one tensor is a multiple of another; that of float64 with room for sums in
another order.
"""


def describe(
    mine: torch.Tensor | None, whole: torch.Tensor | None, mesh: Mesh, proportional: float = PROPORTIONAL
) -> str:
    """The difference of a tensor from its reference, as the end of a sentence: "is tp (2) times the
    reference".
    """
    if mine is None or whole is None:
        return "is missing" if mine is None else "is there, and the reference has none"
    if mine.shape != whole.shape:
        return f"has the shape {list(mine.shape)}, the reference {list(whole.shape)}"
    if not mine.isfinite().all():
        return "is not finite"
    if not mine.any():
        return "is zero"
    if not whole.any():
        return "is not zero, as the reference is"
    factor = ratio(mine, whole, proportional)
    if factor is not None:
        return f"is {factor_words(factor, mesh)} the reference"
    a, b = mine.double().flatten().sort().values, whole.double().flatten().sort().values
    if torch.allclose(a, b, rtol=proportional, atol=1e-12 * b.abs().max().item()):
        return "has the right values in another order: a permutation"
    size = ((mine.double() - whole.double()).norm() / whole.double().norm().clamp(min=1e-300)).item()
    if size < 1e-5:
        return f"differs by {size:.2g} of its norm: noise, of the size that float32 rounds away"
    return f"differs by {size:.2g} of its norm{_where(mine, whole, size * 1e-6)}"


def ratio(
    mine: torch.Tensor | None, whole: torch.Tensor | None, proportional: float = PROPORTIONAL
) -> float | None:
    """The factor between two tensors, if one explains the difference."""
    if mine is None or whole is None or mine.shape != whole.shape:
        return None
    x, y = mine.double(), whole.double()
    square = (y * y).sum().item()
    if not square:
        return None
    factor: float = (x * y).sum().item() / square
    if factor and (x - factor * y).norm().item() <= proportional * abs(factor) * math.sqrt(square):
        return factor
    return None


def factor_words(factor: float, mesh: Mesh) -> str:
    """`tp (2) times`, `1/tp (1/2) of`, or the number where no axes explain it."""
    inverse = axes_of(1 / factor, mesh) if factor else []
    if axes := axes_of(factor, mesh):
        return f"{' or '.join(axes)} ({round(factor)}) times"
    if inverse:
        return f"1/{' or 1/'.join(inverse)} (1/{round(1 / factor)}) of"
    return f"{factor:.6g} times"


def axes_of(factor: float, mesh: Mesh) -> list[str]:
    """The axes, or products of them where no one axis will do, whose size is this factor."""
    above = [a for a, n in mesh.sizes.items() if n > 1]
    for many in range(1, len(above) + 1):
        found = [
            c
            for c in itertools.combinations(above, many)
            if math.isclose(mesh.size(*c), factor, rel_tol=1e-6)
        ]
        if found:
            return [" x ".join(c) for c in found]
    return []


def data_first(axes: list[str], everywhere: bool) -> str | None:
    """Which axis is meant where several have one size: a data axis if every gradient is off by the factor,
    else a tensor axis.
    """
    data = [a for a in axes if a.split(" x ")[0] in DATA_AXES or a in BATCH_AXES]
    tensor = [a for a in axes if a not in data]
    preferred = (data, tensor) if everywhere else (tensor, data)
    return next((a for group in preferred for a in group), None)


def _where(mine: torch.Tensor, whole: torch.Tensor, small: float) -> str:
    """Which part of the tensor is wrong, where that is less than all of it."""
    difference = (mine.double() - whole.double()).abs()
    wrong = difference > small * whole.double().abs().max()
    rest = difference.flatten(0, -2) if difference.ndim > 1 else difference
    if (
        difference.ndim > 1
        and rest.shape[0] > 1
        and (mine - whole).flatten(0, -2).double().std(0).max() <= 1e-9 * rest.max()
    ):
        return ": by the same vector at every position, as a bias would be"
    for dim in range(wrong.ndim - 1 if wrong.ndim > 1 else 1):
        others = [d for d in range(wrong.ndim) if d != dim]
        hit = wrong.any(dim=others) if others else wrong
        where = hit.nonzero().flatten().tolist()
        if where and len(where) < len(hit):
            return f", at {_ranges(where)} of {len(hit)} along dimension {dim} only"
    return ""


def _ranges(indices: list[int]) -> str:
    """`0, 3 to 5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)
