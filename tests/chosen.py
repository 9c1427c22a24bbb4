"""Which members of a large matrix the default run holds: the same ones every day. The others are marked `slow`.

    python -m pytest -m ""     # all of them, as `make test-all`

The members of a matrix hold much the same, and each costs seconds. A matrix says which of its members stand for the rest:
by name (`chosen`), the first of every kind (`first_of_each`), or, where they differ in numbers alone, every fifth (`a_fifth`).
Of a table that a command makes whole, `make test-all` has every value of every column (`values`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

SHARE = 5
"""Of members that differ in numbers alone, one in so many is in the default run."""


def chosen(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Arguments for `pytest.mark.parametrize` of one parameter: those in `keep` are in the default run.

    Raises ValueError for a name in `keep` that the matrix does not have.
    """
    values = list(values)
    if unknown := [name for name in keep if name not in values]:
        raise ValueError(f"the matrix has no {unknown}")
    return [pytest.param(v, marks=() if v in keep else pytest.mark.slow) for v in values]


def first_of_each(values: Iterable[T], kind: Callable[[T], Hashable]) -> list[Any]:
    """As `chosen`, for the first member of each kind."""
    seen: set[Hashable] = set()
    made = []
    for value in values:
        made.append(pytest.param(value, marks=pytest.mark.slow if kind(value) in seen else ()))
        seen.add(kind(value))
    return made


def kind_marks(kinds: Iterable[Hashable]) -> list[tuple[pytest.MarkDecorator, ...]]:
    """The marks of members of these kinds: those of `first_of_each`, for parameters of several values."""
    return [tuple(param.marks) for param in first_of_each(list(kinds), lambda kind: kind)]


def a_fifth(values: Iterable[Any]) -> list[Any]:
    """As `chosen`, for the first member and every fifth after it."""
    return [pytest.param(v, marks=marks_at(place)) for place, v in enumerate(values)]


def marks_at(place: int) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a member at this place of a matrix of which a fifth is in the default run."""
    return () if place % SHARE == 0 else (pytest.mark.slow,)


def values(cells: Sequence[tuple[Hashable, ...]], keep: Collection[Any]) -> list[Any]:
    """As `chosen`, of the cells of a table: those in `keep`, and as few others as it takes to have every value of every column.
    The command that makes the table runs the rest.
    """
    left = {value for cell in cells for value in enumerate(cell)}
    left -= {value for cell in keep for value in enumerate(cell)}
    held = set(keep)
    times = Counter(value for cell in held for value in enumerate(cell))
    while left:
        # Of cells that add as much, one whose values few others have.
        best = max(
            cells, key=lambda cell: (len(left & {*enumerate(cell)}), -sum(times[v] for v in enumerate(cell)))
        )
        held.add(best)
        times.update(enumerate(best))
        left -= {*enumerate(best)}
    return chosen([cell for cell in cells if cell in held], keep)
