"""Balanced divisions of layers against all divisions there are."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.language.pipeline.balance import balanced_by_stage, balanced_sizes, sizes_mistake


def divisions(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, count), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, count)))


def stage_costs(sizes: tuple[int, ...], layers: list[float], head: float, tail: float) -> list[Fraction]:
    costs, start = [], 0
    for size in sizes:
        costs.append(sum(map(Fraction, layers[start : start + size]), Fraction(0)))
        start += size
    costs[0] += Fraction(head)
    costs[-1] += Fraction(tail)
    return costs


cost = st.integers(0, 9) | st.floats(0, 9)


@given(st.lists(cost, min_size=1, max_size=9), st.integers(1, 9), cost, cost)
def test_no_division_has_a_lower_maximum_and_ties_are_broken_as_documented(
    layers: list[float], stages: int, head: float, tail: float
) -> None:
    if stages > len(layers):
        return

    def rank(sizes: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        costs = stage_costs(sizes, layers, head, tail)
        return max(costs), sum((c * c for c in costs), Fraction(0)), sizes

    assert balanced_sizes(layers, stages, head, tail) == min(divisions(len(layers), stages), key=rank)


@given(st.lists(st.lists(cost, min_size=5, max_size=5), min_size=1, max_size=5), cost, cost)
def test_layers_that_cost_something_else_on_each_stage(
    by_stage: list[list[float]], head: float, tail: float
) -> None:
    def rank(sizes: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        ends = [0, *accumulate(sizes)]
        costs = [
            sum(map(Fraction, own[start:end]), Fraction(0))
            for own, (start, end) in zip(by_stage, pairwise(ends), strict=True)
        ]
        costs[0] += Fraction(head)
        costs[-1] += Fraction(tail)
        return max(costs), sum((c * c for c in costs), Fraction(0)), sizes

    assert balanced_by_stage(by_stage, head, tail) == min(divisions(5, len(by_stage)), key=rank)


def test_equal_layers_are_divided_evenly_with_fewer_on_earlier_stages() -> None:
    assert balanced_sizes([0.1] * 10, 4) == (2, 2, 3, 3)
    assert balanced_sizes([1] * 32, 4) == (8, 8, 8, 8)


def test_what_is_before_and_after_the_layers_counts() -> None:
    assert balanced_sizes([1] * 10, 4, head=1, tail=1) == (2, 3, 3, 2)
    assert balanced_sizes([1] * 4, 4, head=100, tail=100) == (1, 1, 1, 1)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be divided into 4 stages"):
        balanced_sizes([1] * 3, 4)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="negative or not finite"):
            balanced_sizes([1, wrong], 1)


def test_a_list_of_sizes_must_fit_the_stages_and_the_layers() -> None:
    assert sizes_mistake([9, 8, 8, 7], 32, 4) is None
    assert "has 3 numbers of layers, but there are 4 stages" in str(sizes_mistake([9, 8, 8], 32, 4))
    assert "stage 2 has no layer" in str(sizes_mistake([16, 8, 0, 8], 32, 4))
    assert "add up to 31, but the model has 32" in str(sizes_mistake([8, 8, 8, 7], 32, 4))
