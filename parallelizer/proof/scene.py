"""A scene: other values than those of a proof's steps, with which the proof runs one step more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Entry, Workload

SMALLER = 1 / 3
"""What the numbers in the rows of the second half of an uneven batch are multiplied by."""

MANY = 8
"""Whole numbers that are at least so many are taken for words of a vocabulary."""


@dataclass(frozen=True)
class Scene:
    """The initial parameters and the numbers of the batch, multiplied by `scale`; in an `uneven` batch rows end early, and the
    second half of them has smaller numbers, and `apart` other words. `line` is where the forward decides otherwise next to
    this scene.
    """

    scale: float
    uneven: bool = False
    apart: bool = False
    line: Span | None = None

    def batch(self, whole: Mapping[str, Tensor], workload: Workload | None, rows: int) -> dict[str, Tensor]:
        """The scene's batch, made of a proof's."""
        entries = workload.entries if workload is not None and self.uneven else {}
        return {name: self._entry(tensor, entries.get(name), rows) for name, tensor in whole.items()}

    def _entry(self, tensor: Tensor, entry: Entry | None, rows: int) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor * self.scale
            if self.uneven and tensor.ndim and tensor.size(0) == rows:
                tensor[rows // 2 :] *= SMALLER
        elif entry is not None and entry.shape == ("batch", "sequence") and entry.ignore is None:
            tensor, length = tensor.clone(), tensor.size(1)
            low, high = entry.range
            if self.apart and high - low >= MANY:
                half = (high - low) // 2
                tensor = low + (tensor - low) % half
                tensor[: rows // 2] += half
            for row in range(rows):
                tensor[row, length - 1 - row * length // (2 * rows) :] = entry.range[0]
        return tensor

    def __str__(self) -> str:
        """`values times 4, in rows of unequal lengths and sizes`."""
        return (
            f"values times {self.scale:.3g}{', in rows of unequal lengths and sizes' if self.uneven else ''}"
        )
