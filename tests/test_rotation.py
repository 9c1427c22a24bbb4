"""Every member of a matrix is due on one day of five, and what is due always on each."""

from __future__ import annotations

import pytest

from tests import rotation
from tests.rotation import TURNS, VARIABLE, marks_at, taking_turns, todays_turn


def due(turn: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What runs by default on a day."""
    monkeypatch.setattr(rotation, "TURN", turn)
    return {param.values[0] for param in taking_turns("abcdefgh", always="ae") if not param.marks}


def test_each_is_due_on_one_day_and_some_on_every(monkeypatch: pytest.MonkeyPatch) -> None:
    days = [due(turn, monkeypatch) for turn in range(TURNS)]
    assert set.union(*days) == set("abcdefgh")
    assert set.intersection(*days) == set("ae")
    assert sum(len(day) for day in days) == 6 + 2 * TURNS
    assert max(len(day) for day in days) - min(len(day) for day in days) <= 1


def test_what_is_not_due_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "TURN", 1)
    assert [[mark.name for mark in marks_at(place)] for place in range(4)] == [
        ["slow"],
        [],
        ["slow"],
        ["slow"],
    ]


def test_a_day_is_pinned_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    assert todays_turn() == 2
    for wrong in ("5", "-1", "tuesday", ""):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(pytest.UsageError, match="write one of 0 to 4"):
            todays_turn()
    monkeypatch.delenv(VARIABLE)
    assert todays_turn() in range(TURNS)
