"""The comparison of schedules."""

from __future__ import annotations

import pytest

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.report.rows.schedules import ScheduleRow, schedule_rows


def test_each_schedule_has_a_row_and_one_that_cannot_run_has_the_reason() -> None:
    rows = {row.name: row for row in schedule_rows(8, 15)}
    assert list(rows) == list(SCHEDULES)
    assert rows["gpipe"] == ScheduleRow("gpipe", 1, pytest.approx(7 / 22), 15)
    assert rows["zbv"] == ScheduleRow("zbv", 2, pytest.approx(7 / 97), 8)
    assert rows["dualpipev"].bubble is None
    assert rows["dualpipev"].misfit == "dualpipev on 8 ranks takes 16 microbatches or more, not 15"


def test_stages_and_durations_can_be_chosen() -> None:
    [row] = schedule_rows(8, 16, [Pipeline("interleaved-1f1b", stages_per_rank=4)])
    assert (row.stages_per_rank, row.bubble, row.live) == (4, pytest.approx(7 / 71), 9.75)
    # GPipe's bubble does not depend on durations; without backwards for weights to fill it with, the others' grows.
    [same] = schedule_rows(4, 8, [Pipeline("gpipe")], (1, 2, 0))
    assert same.bubble == pytest.approx(3 / 11)
    [less, more] = [schedule_rows(4, 8, [Pipeline("zbv")], (1, 1, w))[0].bubble or 0 for w in (1, 0.25)]
    assert more > less
