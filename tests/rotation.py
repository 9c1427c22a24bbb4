"""Cases that take turns: a fifth of a large matrix by day, so that the default run stays within its ten minutes.

The members of a matrix hold much the same, and each costs seconds. A fifth of them runs on any one day, so every
five days all have run; what is not due today is marked `slow`. All at once:

    python -m pytest -m ""                   # everything, as `make test-all`
    PARALLELIZER_ROTATION=1 python -m pytest # as on a day whose turn is 1, to see again what failed then

A run says its turn after the collection. A case's turn is its place in the matrix, so a new case at the end leaves
the others where they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest

TURNS = 5
VARIABLE = "PARALLELIZER_ROTATION"


def todays_turn() -> int:
    """From 0 to 4: the day's by the calendar of UTC, or what the environment pins.

    Raises `pytest.UsageError` where the variable holds anything else.
    """
    pinned = os.environ.get(VARIABLE)
    if pinned is None:
        return datetime.now(UTC).date().toordinal() % TURNS
    if pinned not in {str(turn) for turn in range(TURNS)}:
        raise pytest.UsageError(f"{VARIABLE}={pinned!r}: write one of 0 to {TURNS - 1}")
    return int(pinned)


TURN = todays_turn()


def marks_at(place: int) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a matrix's member at this place: `slow` unless it is due today."""
    return () if place % TURNS == TURN else (pytest.mark.slow,)


def taking_turns(values: Iterable[Any], *, always: Iterable[Any] = ()) -> list[Any]:
    """Arguments for `pytest.mark.parametrize` of one parameter; those in `always` are due every day, and the
    others take turns.
    """
    kept, places = list(always), count()
    return [pytest.param(v, marks=() if v in kept else marks_at(next(places))) for v in values]
