"""The part `valid`: what it counts as wrong."""

from __future__ import annotations

from typing import Any

from benchmarks.search import valid
from benchmarks.search.kept import Kept

GOOD = {"presets": [{"mesh": "fsdp2", "wrong": ""}], "reason": "", "error": False}
EMPTY: dict[str, Any] = {
    "presets": [],
    "reason": "the batch does not divide by the data ranks",
    "error": False,
}


def _wrong(*outcomes: dict[str, Any]) -> list[str]:
    kept = Kept(None)
    kept.found = {f"valid: {number}": outcome for number, outcome in enumerate(outcomes)}
    return list(valid.measure(kept, "", len(outcomes)).wrong)


def test_presets_that_are_valid_are_not_wrong() -> None:
    assert not _wrong(GOOD, GOOD, GOOD, EMPTY)
    assert len(_wrong(GOOD, {**GOOD, "presets": [{"mesh": "fsdp2", "wrong": "it is refused"}]})) == 1


def test_searches_that_find_nothing_are_wrong_where_they_are_many() -> None:
    [one] = _wrong(GOOD, GOOD, EMPTY, EMPTY)
    assert one.startswith("2 of 4 searches found nothing")


def test_an_error_is_wrong() -> None:
    [one] = _wrong(GOOD, GOOD, GOOD, {"presets": [], "reason": "no plan is chosen", "error": True})
    assert "no plan is chosen" in one
