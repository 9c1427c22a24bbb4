"""docs/pipelines.md shows the orders that ranks run, and the figures of their replays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.order_file import read_order
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.report.rows.schedules import schedule_rows
from tests.docs.test_site import DOCS, script

TEXT = (DOCS / "pipelines.md").read_text()
draw = script(DOCS / "pictures/schedules.py")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_page_has_the_picture_of_each_schedule_as_it_is_drawn(name: str) -> None:
    assert f"](pictures/schedule-{name}.svg)" in TEXT
    assert (DOCS / f"pictures/schedule-{name}.svg").read_text() == draw.drawn(name)


def test_no_picture_is_left_of_a_schedule_that_is_gone() -> None:
    assert {
        path.stem.removeprefix("schedule-") for path in (DOCS / "pictures").glob("schedule-*.svg")
    } == set(SCHEDULES)


def test_the_figures_are_those_of_the_replay() -> None:
    pipelines = [*map(Pipeline, SCHEDULES), Pipeline("interleaved-1f1b", stages_per_rank=4)]
    expected = {
        (
            f"`{row.name}`",
            str(row.stages_per_rank),
            f"{100 * (row.bubble or 0):.1f} %",
            f"{row.live or 0:.3g}",
        )
        for row in schedule_rows(8, 16, pipelines)
    }
    table = TEXT.partition("| schedule | stages on each rank | bubble | live microbatches |")[2].partition(
        "\n\n"
    )[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.strip().splitlines()[1:]
    ]
    assert set(rows) == expected and len(rows) == len(expected)


def test_what_the_page_says_of_numbers_is_what_each_schedule_takes() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\S[^|]*?) \| \S[^|]* \| (?:\[|Qi)", TEXT, re.M))
    assert list(rows) == list(SCHEDULES)
    for name, said in rows.items():
        wrong = [n for n in (1, 2, 3, 4) if SCHEDULES[name].misfit(4, n, 8) is not None]
        assert wrong == {"1": [2, 3, 4], "2": [1, 3, 4], "2 or more": [1], "any number": []}[said]
        few = SCHEDULES[name].misfit(4, SCHEDULES[name].stages_per_rank, 7) is None
        assert few == (name != "dualpipev")


def test_the_file_can_be_read(tmp_path: Path) -> None:
    [text] = re.findall(r"```text\n(.*?)```", TEXT, re.S)
    (tmp_path / "mine.csv").write_text(text)
    assert len(read_order(str(tmp_path / "mine.csv"), "mine.csv")) == 2
