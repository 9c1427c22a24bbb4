"""Ulysses inside a ring, at every degree; the rows and columns of ranks; and how its degree is chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.choice import METHODS, Heads, best_degree, cheapest, degrees, sent
from parallelizer.styles.context_parallel.part import places, row_and_column
from tests.ranks import run_ranks
from tests.styles.context_parallel.matrix import LIMIT, ORDERS, Case, errors
from tests.styles.context_parallel.test_methods import bytes_sent

DEGREES = (1, 2, 4)
HEADS = (Heads(12, 12), Heads(8, 4))
MASKS = ("causal", "none", "documents", "of_each_head", "padding")
# A grid under every mask; where it is a ring, or ulysses, or of a group in another order, what there is for it to mistake.
CASES = (
    *itertools.product(["in order"], ORDERS, [2], MASKS, HEADS),
    *itertools.product(["in order"], ["head-tail", "per-document"], [1, 4], ["causal"], HEADS),
    *itertools.product(["mixed"], ORDERS, [2], ["causal"], HEADS[:1]),
)
ONLY_PAIRS = Heads(12, 6)
"""Key heads that two ranks can share, and four cannot."""


def on_four_ranks() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    # Not in their order: a group may have been made so by whoever made the mesh.
    mixed = dist.new_group([2, 0, 3, 1], sort_ranks=False)
    groups = {"in order": dist.new_group([0, 1, 2, 3]), "mixed": mixed}
    for name, order, degree, mask, heads in CASES:
        case = Case(4, "ulysses-ring", order, mask, heads, 27 if degree == 2 else 48)
        found["errors", name, case, degree] = max(errors(case, groups[name], ulysses_degree=degree).values())
    group = groups["in order"]
    for degree in DEGREES:
        for heads in HEADS:
            for is_causal in (True, False):
                found["bytes", degree, heads, is_causal] = bytes_sent(
                    group, "ulysses-ring", heads, is_causal, ulysses_degree=degree
                )
    found["auto"] = bytes_sent(group, "auto", ONLY_PAIRS, True)
    found["ranks"] = [
        [part.global_rank(r) for r in range(part.ranks)] for part in row_and_column(groups["mixed"], 2)
    ]
    return found


@pytest.fixture(scope="module")
def everything() -> list[dict[Any, Any]]:
    return run_ranks(on_four_ranks, 4)


@pytest.mark.ranks
def test_outputs_and_gradients_are_those_of_the_whole_sequence(everything: list[dict[Any, Any]]) -> None:
    for found in everything:
        worst = {key: error for key, error in found.items() if key[0] == "errors"}
        assert len(worst) == len(CASES)
        assert not {key: error for key, error in worst.items() if not error < LIMIT}


@pytest.mark.ranks
def test_every_degree_sends_what_the_closed_form_says(everything: list[dict[Any, Any]]) -> None:
    for rank, found in enumerate(everything):
        for _, degree, heads, is_causal in (key for key in found if key[0] == "bytes"):
            said = sent("ulysses-ring", heads, 4, rank, is_causal=is_causal, degree=degree)
            assert found["bytes", degree, heads, is_causal] == said, (rank, degree, heads, is_causal)
            same = {1: "ring", 4: "ulysses"}.get(degree)
            assert same is None or said == sent(same, heads, 4, rank, is_causal=is_causal)


@pytest.mark.ranks
def test_auto_takes_it_where_four_ranks_have_key_heads_for_two(everything: list[dict[Any, Any]]) -> None:
    assert cheapest(ONLY_PAIRS, 4, is_causal=True) == "ulysses-ring"
    for rank, found in enumerate(everything):
        assert found["auto"] == sent("ulysses-ring", ONLY_PAIRS, 4, rank, is_causal=True, degree=2)


@pytest.mark.ranks
def test_rows_and_columns_are_in_the_order_of_the_group(everything: list[dict[Any, Any]]) -> None:
    # The group is 2, 0, 3, 1: rows (2, 0) and (3, 1), columns (2, 3) and (0, 1).
    assert [found["ranks"] for found in everything] == [
        [[2, 0], [0, 1]], [[3, 1], [0, 1]], [[2, 0], [2, 3]], [[3, 1], [2, 3]]
    ]  # fmt: skip


@given(st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (12, 6)]), st.integers(1, 3))
def test_a_row_holds_what_one_of_fewer_ranks_would(sizes: tuple[int, int], rows: int) -> None:
    ranks, degree = sizes
    length = 2 * ranks * rows
    for rank in range(0, ranks, degree):
        row, column = places(ranks, rank, degree)
        together = balance.unsplit_parts([balance.local_positions(length, ranks, r) for r in row], 0)
        assert torch.equal(together, balance.local_positions(length, ranks // degree, rank // degree))
        assert column.index(rank) == rank // degree and len(column) == ranks // degree


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 32), st.booleans())
def test_the_default_degree_sends_least(keys: int, group: int, ranks: int, is_causal: bool) -> None:
    heads = Heads(keys * group, keys)
    chosen = best_degree(heads, ranks)
    assert ranks % chosen == 0 and heads.keys % chosen == 0
    least = sent("ulysses-ring", heads, ranks, is_causal=is_causal, degree=chosen)
    for degree in degrees(heads, ranks):
        assert least <= sent("ulysses-ring", heads, ranks, is_causal=is_causal, degree=degree)


def test_more_ranks_than_key_heads() -> None:
    """32 ranks, 64 query and 8 key heads: what each sends, in bytes of one rank's keys and values."""
    heads = Heads(64, 8)
    shares = {m: float(sent(m, heads, 32, is_causal=True)) for m in METHODS if m != "ulysses"}
    assert shares == {"all-gather": 93, "ring": 93, "ulysses-ring": 2 * 7 / 8 * 9 + 3 * 3}
    assert best_degree(heads, 32) == 8
    # So many queries to a key that to send them costs more than to pass the keys on.
    assert best_degree(Heads(64, 2), 4) == 1
    assert cheapest(Heads(64, 2), 4, is_causal=True) == "ring"
