"""The picture of a schedule in a terminal."""

from __future__ import annotations

import io
import re

import pytest

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import replay
from parallelizer.language.pipeline.settings import Pipeline, order_of
from parallelizer.report.rows.schedules import schedule_rows
from parallelizer.report.text.schedule import BANDS, RANKS, picture, write, write_table
from parallelizer.report.text.tables import console


def printed(pipeline: Pipeline, ranks: int, width: int) -> str:
    stream = io.StringIO()
    write(order_of(pipeline, ranks), console(stream, width))
    return stream.getvalue()


def test_a_short_step_is_one_row_a_rank() -> None:
    assert printed(Pipeline("1f1b", 3), 2, 60) == (
        "rank 0  0F0 0F1 .   .   0B0 --- 0F2 0B1 --- .   0B2 ---\n"
        "rank 1  .   1F0 1B0 --- 1F1 1B1 --- 1F2 1B2 --- .   .\n"
        "0F3 is the forward of stage 0 for microbatch 3; B its\n"
        "backward, I and W the two halves of one; . waits\n"
    )


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 32), (24, 48)])
def test_a_picture_is_as_narrow_as_the_terminal_and_not_longer_than_some_bands(
    name: str, ranks: int, count: int, width: int
) -> None:
    text = printed(Pipeline(name, count), ranks, width)
    assert max(map(len, text.splitlines())) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())
    shown = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(shown) <= BANDS * min(ranks, RANKS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_in_the_slot_in_which_it_starts(name: str) -> None:
    order = order_of(Pipeline(name, 8), 4)
    rows = [line.plain.split()[2:] for line in picture(order, 10_000)]
    for row, timed in zip(rows, replay(order).ranks, strict=True):
        slots = {at: cell for at, cell in enumerate(row) if re.fullmatch(r"\d+[FBIW]\d+", cell)}
        assert slots == {round(one.start): str(one.action) for one in timed}


def test_what_is_left_out_is_said() -> None:
    text = printed(Pipeline("zbv", 32), 24, 100)
    assert "ranks 8 to 15 are left out" in text
    [(first, last)] = re.findall(r"^slots (\d+) to (\d+) are left out$", text, re.M)
    parts = [(int(a), int(b)) for a, b in re.findall(r"^slots (\d+) to (\d+) of \d+$", text, re.M)]
    assert parts[0][0] == 1 and parts[1][1] + 1 == int(first) and int(last) + 1 == parts[2][0]


def test_the_table_fits_and_has_the_reasons_below() -> None:
    for width in (60, 100):
        stream = io.StringIO()
        write_table(schedule_rows(8, 15), console(stream, width), 8, 15)
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0] == "schedules  on 8 ranks with 15 microbatches"
        assert "dualpipev on 8 ranks takes 16 microbatches" in lines[-1] + lines[-2]
        assert [line.split()[0] for line in lines[2:7]] == [name for name in SCHEDULES if name != "dualpipev"]
        assert "31.8%" in lines[2] and lines[2].endswith("15")
