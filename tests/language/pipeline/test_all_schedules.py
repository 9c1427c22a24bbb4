"""Every schedule against PyTorch's own orders, and against what holds for any order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.language.pipeline import all_schedules, schedules
from parallelizer.language.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    all_actions,
    stage_ranks,
)
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from tests.language.pipeline.torch_orders import SCHEDULE_CLASSES, torch_order

NUMBERS = [
    (ranks, stages, count) for ranks in (1, 2, 3, 4, 8) for stages in (1, 2, 3, 4) for count in range(1, 25)
]

numbers = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 40))


def test_every_file_is_in_the_table() -> None:
    folder = Path(schedules.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(all_schedules.SCHEDULE_FILES)
    assert set(SCHEDULES) == set(SCHEDULE_CLASSES)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1f1b"])
def test_the_order_is_that_of_torch_and_the_same_numbers_are_refused(name: str) -> None:
    compared = 0
    for ranks, stages, count in NUMBERS:
        wrong = SCHEDULES[name].misfit(ranks, stages, count)
        if wrong is not None and wrong.key == "stages_per_rank" and not name.startswith("zbv"):
            continue  # the numbers of stages that need other schedules: PyTorch does not look at them
        try:
            expected = torch_order(name, ranks, stages, count)
        except ValueError:
            assert wrong is not None, (ranks, stages, count)
            continue
        assert wrong is None, (ranks, stages, count)
        assert SCHEDULES[name].order(ranks, stages, count) == expected
        compared += 1
    assert compared > 50


def test_1f1b_is_torchs_on_all_ranks_but_the_last_where_torch_begins_with_microbatch_1() -> None:
    for ranks, count in ((2, 2), (2, 5), (4, 4), (4, 8), (8, 16)):
        ours, torchs = SCHEDULES["1f1b"].order(ranks, 1, count), torch_order("1f1b", ranks, 1, count)
        # PyTorch counts its forwards on from 0 where a rank has no forwards ahead, and so never runs microbatch 0.
        assert str(torchs[-1][0]) == f"{ranks - 1}F1"
        assert ours[:-1] == torchs[:-1] or count == ranks
        assert [str(a) for a in ours[-1]] == [f"{ranks - 1}{k}{m}" for m in range(count) for k in "FB"]


@given(st.sampled_from(list(SCHEDULES)), numbers)
def test_an_order_is_complete_and_each_action_stands_after_those_that_it_needs(
    name: str, sizes: tuple[int, int, int]
) -> None:
    ranks, stages, count = sizes
    schedule = SCHEDULES[name]
    if schedule.misfit(*sizes) is not None:
        return
    order = schedule.order(*sizes)
    every = list(all_actions(order))
    assert len(every) == len(set(every))
    lies = stage_ranks(order)
    assert lies == tuple(schedule.rank_of(stage, ranks) for stage in range(ranks * stages))
    kinds: dict[tuple[int, int], str] = {}
    for action in every:
        kinds[action.stage, action.microbatch] = (
            kinds.get((action.stage, action.microbatch), "") + action.kind
        )
    assert set(kinds) == {(stage, mb) for stage in range(ranks * stages) for mb in range(count)}
    assert set(kinds.values()) <= {FORWARD + BACKWARD, FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT}


@given(st.sampled_from(list(SCHEDULES)), numbers)
def test_the_numbers_that_a_refusal_names_are_accepted(name: str, sizes: tuple[int, int, int]) -> None:
    ranks, stages, count = sizes
    wrong = SCHEDULES[name].misfit(*sizes)
    if wrong is None:
        return
    named = [int(word) for word in wrong.help.replace(",", " ").replace(";", " ").split() if word.isdecimal()]
    assert named
    for number in named:
        again = (
            SCHEDULES[name].misfit(ranks, stages, number)
            if wrong.key == "microbatches"
            else SCHEDULES[name].misfit(ranks, number, count)
        )
        assert again is None or again.key != wrong.key, (wrong, number)


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 16))
def test_the_default_numbers_fit_every_schedule(name: str, ranks: int) -> None:
    schedule = SCHEDULES[name]
    assert schedule.misfit(ranks, schedule.stages_per_rank, 2 * ranks) is None
