"""The rows of the table of rank classes: those of equal figures together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallelizer.simulate.record.rank_classes import RankClass


@dataclass(frozen=True)
class RankClassRow:
    """Classes of ranks that hold, need and send the same. A figure is None where no rank of them was traced."""

    like: tuple[int, ...]
    ranks: int
    parameters_bytes: int
    peak: int | None
    sent_bytes: int | None


def rank_class_rows(classes: Iterable[RankClass]) -> list[RankClassRow]:
    """Rows in the order of their first classes; `like` has one rank of each."""
    groups: dict[tuple[int, int | None, int | None], list[RankClass]] = {}
    for one in classes:
        groups.setdefault((one.parameters_bytes, one.peak, one.sent_bytes), []).append(one)
    return [
        RankClassRow(tuple(c.rank for c in alike), sum(c.ranks for c in alike), *figures)
        for figures, alike in groups.items()
    ]
