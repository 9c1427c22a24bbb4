"""Errors, and which of them rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

MARGIN = 16.0
"""How much more than the calibrating run's constant is still rounding: sharding changes the order of every
sum, the calibrating run that of linears and of the batch only.
"""

LIMIT = 1e4
"""The largest constant of a calibrating run with which bounds are what it says. Seen are constants below 1."""

AMPLIFIED = 1e6
"""The largest one that a proof is made with; above `LIMIT` no bound is wider than `WIDEST`. A tiny T5, whose attention is not
scaled, has 4e4. A model that draws random numbers has 1e14, and everything would pass.
"""

WIDEST = 1e-5
"""Far below what a wrong rule changes a gradient by."""

TINY = 1e-9
"""The share of the whole below which a gradient is what rounding leaves of larger terms: that of queries and keys behind a
softmax that has one value, say.
"""


def finite_norm(tensor: torch.Tensor) -> float:
    """The norm of a tensor without its infinities, in float64."""
    return tensor.double().masked_fill(tensor.isinf(), 0.0).norm().item()


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference||, in float64. An infinity that both have in one place, such as the -inf of a mask, counts 0."""
    return (value.double() - reference.double()).masked_fill(value == reference, 0.0).norm().item()


def relative_error(
    value: torch.Tensor | None, reference: torch.Tensor | None, whole: float = 0.0, least: float = 0.0
) -> float:
    """||value - reference|| / ||reference||, in float64; infinite where one is missing, of another shape or
    not finite.

    What cancels to zero, the gradient of a key's bias say, is only rounding on both sides. So where the
    reference is at most `least * whole`, the error is relative to `whole`, the norm of all that is of its
    kind. So it is, too, where the error is at most `least * whole` and the reference at most `TINY * whole`.
    """
    if value is None or reference is None:
        return 0.0 if value is None and reference is None else math.inf
    if value.shape != reference.shape:
        return math.inf
    value, reference = value.double(), reference.double()
    norm = finite_norm(reference)
    error = distance(value, reference)
    if not math.isfinite(error):
        return math.inf
    if norm <= least * whole or (norm <= TINY * whole and error <= least * whole):
        norm = whole
    return error / norm if norm else (0.0 if error == 0 else math.inf)


def least_norm(dtype: torch.dtype, terms: int) -> float:
    """The share of the whole up to which a sum of so many terms is only rounding."""
    return MARGIN * torch.finfo(dtype).eps * math.sqrt(terms)


def norm_of(tensors: Iterable[torch.Tensor | None]) -> float:
    """The norm of all of them together."""
    return math.hypot(*(t.double().norm().item() for t in tensors if t is not None))


def terms_of(tensor: torch.Tensor | None, tokens: int) -> int:
    """The terms of the longest sum behind a quantity: the tokens of the global batch times the width that it
    came through.
    """
    return tokens * (tensor.shape[-1] if tensor is not None and tensor.ndim else 1)


def nudge_size(dtype: torch.dtype) -> float:
    """The relative error that a calibrating run's first gradients are given: far above rounding, far below
    anything wrong.
    """
    return 4096 * torch.finfo(dtype).eps
