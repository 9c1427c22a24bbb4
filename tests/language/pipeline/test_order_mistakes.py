"""What an order lacks for a whole step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.language.pipeline.actions import Action, ActionKind, Order, parse_actions
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.order_mistakes import order_mistakes


def order(*rows: str) -> Order:
    return tuple(tuple(a for cell in row.split() for a in parse_actions(cell)) for row in rows)


@pytest.mark.parametrize(
    ("rows", "message", "at"),
    [
        (["0F0 0B0 0F1", "1F0 1B0 1F1 1B1"], "the backward 0B1 is missing", "0F1"),
        (["0F0 0B0", "1F0 1B0 1F1 1B1"], "0F1 is missing", None),
        (["0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], "0F1 is missing", "0B1"),
        (["0F0 0F1 0B0 0B1", "1F0 1F2 1B0 1B1"], "1F2 is the only action of microbatch 2", "1F2"),
        (["0F0 0F0 0B0"], "0F0 is there twice", "0F0"),
        (["0F0 0W0"], "0W0 is there without 0I0", "0W0"),
        (["0F0 0I0"], "0I0 is there without 0W0", "0I0"),
        (["0F0 0B0 0W0"], "0B0 and 0W0 run the same backward", "0W0"),
        (["0F0 0B0 0I0 0W0"], "0B0 and 0I0 run the same backward", "0I0"),
        (["0F0 0B0", ""], "rank 1 has no actions", None),
        (["0F0 0B0", "2F0 2B0"], "there is a stage 2, but no stage 1", "2F0"),
        (["0F0 1B0 0B0", "1F0"], "stage 1 lies on rank 0 and on rank 1", "1F0"),
        (["0F0 0B0 1F0 1B0", "2F0 2B0"], "rank 1 has 1 stage, but rank 0 has 2", None),
    ],
)
def test_a_mistake_is_named_at_its_action(rows: list[str], message: str, at: str | None) -> None:
    [found] = order_mistakes(order(*rows))
    assert (found.message, str(found.action) if found.action else None) == (message, at)


def test_huge_numbers_are_refused_quickly() -> None:
    assert len(order_mistakes(order("0F999999 0B999999 999999F0"))) == 1
    assert len(order_mistakes(order("0F999999 0B999999"))) == 1


@given(
    st.sampled_from(list(SCHEDULES)),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8)),
    st.randoms(use_true_random=False),
)
def test_a_schedule_has_no_mistake_and_with_any_action_changed_it_has_one(
    name: str, sizes: tuple[int, int, int], chance: random.Random
) -> None:
    if SCHEDULES[name].misfit(*sizes) is not None:
        return
    whole = SCHEDULES[name].order(*sizes)
    assert order_mistakes(whole) == ()
    rows = [list(row) for row in whole]
    row = chance.choice(rows)
    at = chance.randrange(len(row))
    other = Action(
        chance.choice(list(ActionKind)), chance.randrange(sizes[0] * sizes[1]), chance.randrange(sizes[2] + 1)
    )
    change = chance.choice(("remove", "repeat", "replace"))
    if change == "remove":
        del row[at]
    elif change == "repeat":
        row.insert(chance.randrange(len(row)), row[at])
    else:
        row[at] = other
    changed = tuple(map(tuple, rows))
    if changed == whole or (sizes[2] == 1 and other.microbatch == 1):
        return
    assert order_mistakes(changed)
