"""The rows that a dry run takes to go to each expert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.language.routing import Routing, RoutingError

COUNTED = Routing(counted={"moe": [[[3, 5], [6, 2]], [[8, 0], [0, 8]]]}, file="counts.json")


@given(
    rows=st.integers(0, 500),
    each=st.integers(1, 5),
    ranks=st.integers(1, 6),
    routing=st.sampled_from([Routing(), Routing(worst=True), Routing(skew=1.3), Routing(skew=9.0)]),
)
def test_every_row_goes_to_an_expert_and_the_ranks_agree(
    rows: int, each: int, ranks: int, routing: Routing
) -> None:
    taken = [routing.rows(rows, each * ranks, range(ranks), index, "moe") for index in range(ranks)]
    for index, (sent, received) in enumerate(taken):
        assert sum(sent) == rows and min(sent) >= 0
        own = slice(index * each, (index + 1) * each)
        assert received == [other[own] for other, _ in taken]


def test_the_counts_of_a_run_are_taken_call_by_call() -> None:
    assert COUNTED.rows(8, 2, (0, 1), 0, "moe", 0) == ([3, 5], [[3], [6]])
    assert COUNTED.rows(8, 2, (0, 1), 1, "moe", 1) == ([0, 8], [[0], [8]])
    assert COUNTED.rows(8, 2, (0, 1), 1, "moe", 2) == COUNTED.rows(8, 2, (0, 1), 1, "moe", 0)


@pytest.mark.parametrize(
    ("rows", "experts", "ranks", "path", "said"),
    [
        (8, 2, (0, 1), "layers.0", "no counts of layers.0; its first are of moe"),
        (8, 2, (2, 3), "moe", "the counts of 2 ranks, and this mesh has more"),
        (8, 4, (0, 1), "moe", "counts 2 experts in moe, which has 4"),
        (16, 2, (0, 1), "moe", "rank 0 sends 8 rows to the experts of moe in it, and 16 rows here"),
    ],
)
def test_the_counts_of_another_run_are_refused(
    rows: int, experts: int, ranks: tuple[int, int], path: str, said: str
) -> None:
    with pytest.raises(RoutingError, match=said):
        COUNTED.rows(rows, experts, ranks, 0, path)
