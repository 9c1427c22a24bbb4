"""Positions that every rank counts for itself, though it has a part of the sequence: a range of the local length, or the first
rows of a table. They are the same on every rank and meet rows that are not.

What a forward makes or reads by position is known before a plan is applied (`compiler/observe/position_reads.py`) for models
that run at any length of the sequence. Here it is seen at the length that a rank really has, for the others too: those that
work in windows or patches, and those of a family that looks after its own positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelizer import torch_private
from parallelizer.simulate.follow.varying import SEQUENCE_AXIS, Varying

_COUNTED = "_parallelizer_counted_by"

_ROWS_OF = ("aten::slice", "aten::narrow", "aten::index_select")
"""Operators that take some rows of a tensor along one dimension."""


@dataclass(frozen=True)
class Counted:
    """Positions that are the same on every rank, made in `module`: the first rows of the model's `tensor` along
    `dim`, or, without one, numbers that the forward makes from the local length.
    """

    module: str
    tensor: str | None = None
    dim: int | None = None


@dataclass(frozen=True)
class LocalPositions:
    """Counted positions that meet a part of the sequence in `module`."""

    module: str
    counted: Counted


class Positions:
    """Follows positions that every rank counts alike, from where they are made to where they meet the sequence.

    `length` is that of a rank's part of the sequence, `held` names the model's own tensors by their storage.
    What is made by operators that read both is judged at the first that puts them together element by element,
    along a dimension of that length.
    """

    def __init__(self, length: int, held: Mapping[int, str], varying: Varying) -> None:
        self.length, self.held, self.where, self.varies = length, held, varying.where, varying.tags
        self.found: list[LocalPositions] = []

    def __call__(
        self, func: Any, args: Any, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Look at one operator that was run."""
        counted = [
            (t, c) for t in read if (c := getattr(t, _COUNTED, None)) and SEQUENCE_AXIS not in self.varies(t)
        ]
        if any(SEQUENCE_AXIS in self.varies(t) for t in read):
            if torch.Tag.pointwise in func.tags:
                self._meet(counted, [t for t in read if SEQUENCE_AXIS in self.varies(t)])
            return
        origin = counted[0][1] if counted else self._made(func._schema.name, read, made)
        if origin is not None:
            for tensor in made:
                setattr(tensor, _COUNTED, origin)

    def _meet(self, counted: Sequence[tuple[torch.Tensor, Counted]], rows: Sequence[torch.Tensor]) -> None:
        for tensor, origin in counted:
            dims = [-i for i, size in enumerate(reversed(tensor.shape), 1) if size == self.length]
            if any(d >= -row.ndim and row.shape[d] == self.length for d in dims for row in rows):
                found = LocalPositions(self.where(), origin)
                if origin not in [f.counted for f in self.found]:
                    self.found.append(found)

    def _made(self, name: str, read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Counted | None:
        if name == "aten::arange":
            return Counted(self.where()) if made and made[0].shape[0] == self.length else None
        if name not in _ROWS_OF or not read or not made or read[0].ndim != made[0].ndim:
            return None
        cut = [d for d, (a, b) in enumerate(zip(read[0].shape, made[0].shape, strict=True)) if a != b]
        tensor = self.held.get(torch_private.storage_key(read[0]))
        if tensor is None or len(cut) != 1 or made[0].shape[cut[0]] != self.length:
            return None
        return Counted(self.where(), tensor, cut[0])
