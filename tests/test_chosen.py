"""The default run holds the members of a matrix that stand for the rest, and the others are slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chosen import a_fifth, chosen, first_of_each, values


def default(params: list[Any]) -> list[Any]:
    """What runs by default; the others must be marked slow and be there."""
    assert all([mark.name for mark in param.marks] in ([], ["slow"]) for param in params)
    return [param.values[0] for param in params if not param.marks]


def test_those_named_are_in_the_default_run() -> None:
    params = chosen("abcdef", "ce")
    assert default(params) == ["c", "e"] and len(params) == 6


def test_a_name_that_the_matrix_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['x'\]"):
        chosen("abc", ["a", "x"])


def test_the_first_of_each_kind_is_in_the_default_run() -> None:
    params = first_of_each([1, 3, 2, 4, 5], lambda number: number % 2)
    assert default(params) == [1, 2] and len(params) == 5


def test_every_fifth_is_in_the_default_run() -> None:
    params = a_fifth(range(11))
    assert default(params) == [0, 5, 10] and len(params) == 11


def test_values_hold_every_value_in_few_cells_and_the_kept_ones() -> None:
    cells = [(a, b) for a in "abcdefgh" for b in range(5) if (a, b) != ("c", 3)]
    params = values(cells, [("a", 0)])
    held = [param.values[0] for param in params]
    assert {a for a, _ in held} == set("abcdefgh") and {b for _, b in held} == set(range(5))
    assert 8 <= len(held) <= 10 and default(params) == [("a", 0)]
    assert params == values(cells, [("a", 0)])


def test_cells_that_add_as_much_take_turns() -> None:
    """The cells of a column with more values than the others do not all have the first of these."""
    held = [param.values[0] for param in values([(a, b) for a in range(9) for b in "xyz"], ())]
    assert [sum(b == one for _, b in held) for one in "xyz"] == [3, 3, 3]
