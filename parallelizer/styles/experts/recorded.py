"""What experts count while they are watched: the rows to each expert, by module and call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from parallelizer.torch_private import in_backward

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowCounts:
    """By the path of each module of experts, for each of its calls: the rows that this rank `sent` to every expert [experts],
    and the number of rows that it `received`. A forward that is recomputed is a call too, and `again` says so.
    """

    sent: dict[str, list[Tensor]] = field(default_factory=dict)
    received: dict[str, list[int]] = field(default_factory=dict)
    again: dict[str, list[bool]] = field(default_factory=dict)

    def once(self, path: str) -> list[tuple[Tensor, int]]:
        """What was sent and received in each call of a module, without those that a checkpoint repeats."""
        calls = zip(
            self.sent.get(path, ()), self.received.get(path, ()), self.again.get(path, ()), strict=True
        )
        return [(sent, received) for sent, received, again in calls if not again]

    def tables(self) -> dict[str, list[list[int]]]:
        """The rows sent, as numbers."""
        return {path: [call.tolist() for call in calls] for path, calls in self.sent.items()}


_watching: list[RowCounts] = []


@contextmanager
def counted_rows() -> Iterator[RowCounts]:
    """Inside, every call of a module of experts on this rank is counted."""
    counts = RowCounts()
    _watching.append(counts)
    try:
        yield counts
    finally:
        _watching.remove(counts)


def count(path: str, sent: Tensor, received: int) -> None:
    """A module was called."""
    for each in _watching:
        each.sent.setdefault(path, []).append(sent)
        each.received.setdefault(path, []).append(received)
        each.again.setdefault(path, []).append(in_backward())
