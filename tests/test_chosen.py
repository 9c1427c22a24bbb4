"""The default run holds the members of a matrix that stand for the rest, and the others are slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chosen import a_fifth, chosen, first_of_each, pairs, values


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


def test_pairs_hold_every_pair_in_few_cells_and_the_kept_ones() -> None:
    cells = [(a, b, c) for a in "abcdefgh" for b in range(5) for c in "xyz" if (a, b) != ("c", 3)]
    keep = [("a", 0, "x"), ("h", 4, "z")]
    params = pairs(cells, keep)
    held = [param.values[0] for param in params]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(h[one], h[other]) for h in held} == {(c[one], c[other]) for c in cells}
    assert 39 <= len(held) < 50 and len(set(held)) == len(held)
    assert [param.values[0] for param in params if not param.marks] == keep
    assert params == pairs(cells, keep)


def test_values_hold_every_value_in_few_cells_and_the_kept_ones() -> None:
    cells = [(a, b) for a in "abcdefgh" for b in range(5) if (a, b) != ("c", 3)]
    params = values(cells, [("a", 0)])
    held = [param.values[0] for param in params]
    assert {a for a, _ in held} == set("abcdefgh") and {b for _, b in held} == set(range(5))
    assert 8 <= len(held) <= 10 and default(params) == [("a", 0)]
