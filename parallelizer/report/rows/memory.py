"""The rows of the tables of memory: what a rank holds when it holds most, by kind, and how high each phase goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallelizer.simulate.record.memory import Point, Usage


@dataclass(frozen=True)
class MemoryRow:
    """One kind of memory: the bytes `held` at the peak, and the `most` of some moments."""

    kind: str
    held: int
    most: int


def memory_rows(usage: Usage, kinds: Iterable[str], moments: Sequence[Point] = ()) -> list[MemoryRow]:
    """A row for each of the kinds, in their order."""
    return [
        MemoryRow(
            kind,
            held := usage.at_peak.get(kind, 0),
            max((point.by_category.get(kind, 0) for point in moments), default=held),
        )
        for kind in kinds
    ]


def phase_runs(course: Iterable[Point]) -> list[tuple[str, list[Point]]]:
    """The phases of a course in order, each with its points. What happens between two phases belongs to the one
    before, at the start to the first.
    """
    runs: list[tuple[str, list[Point]]] = []
    for phase, group in itertools.groupby(course, lambda p: p.phase):
        points = list(group)
        if runs and phase in ("", runs[-1][0]):
            runs[-1][1].extend(points)
        elif runs and not runs[-1][0]:
            runs[-1] = (phase, runs[-1][1] + points)
        else:
            runs.append((phase, points))
    return runs


def highest_by_phase(runs: Iterable[tuple[str, Sequence[Point]]]) -> dict[str, Point]:
    """The fullest moment of each phase. Phases that come again, with every part of a batch, are one."""
    highest: dict[str, Point] = {}
    for phase, points in runs:
        top = max(points, key=lambda p: p.total)
        if phase not in highest or top.total > highest[phase].total:
            highest[phase] = top
    return highest
