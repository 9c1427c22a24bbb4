"""Counts that only values tell, made up: how many rows a router sends to an expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten

ROWS = 6
"""How many places of a tensor are taken to hold what is looked for."""


def made_up(func: Any, args: Sequence[Any], rows: int = ROWS) -> torch.Tensor | None:
    """The places at which a tensor is not zero, on fake tensors, which hold nothing; None for another operator."""
    if func is aten.nonzero.default:
        return args[0].new_empty((rows, args[0].ndim), dtype=torch.int64)
    return None


def without_masks(func: Any, args: Sequence[Any], rows: int = ROWS) -> Sequence[Any]:
    """The arguments of an operator with indices for a mask of booleans, of which as many are taken to be true; the same object
    without a mask.
    """
    if func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
        return args
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        return args
    indices: list[Any] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            indices += [index.new_empty((rows,), dtype=torch.int64) for _ in range(index.ndim)]
        else:
            indices.append(index)
    return [args[0], indices, *args[2:]]
