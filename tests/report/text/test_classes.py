"""The table of rank classes: equal figures in one row, and no figure that nobody has seen."""

from __future__ import annotations

import io

import pytest

from parallelizer.report.text import classes, tables
from parallelizer.simulate.record.rank_classes import RankClass


def printed(*found: RankClass, width: int = 100) -> str:
    stream = io.StringIO()
    classes.write(found, tables.console(stream, width))
    return stream.getvalue()


def test_a_row_for_what_differs() -> None:
    text = printed(
        RankClass(0, 4, 1024, 4096, 10), RankClass(4, 8, 1024, 4096, 10), RankClass(12, 4, 0, 1024, 10)
    )
    rows = [line.split() for line in text.splitlines()]
    assert rows[0][:3] == ["ranks", "3", "classes,"]
    assert rows[2] == ["0,", "4", "12", "1.0", "KiB", "4.0", "KiB", "10", "B"]
    assert rows[3] == ["12", "4", "0", "B", "1.0", "KiB", "10", "B"]
    assert "not traced" not in text.lower()


def test_classes_of_equal_figures_take_a_line() -> None:
    text = printed(RankClass(0, 4, 1024, 4096, 10), RankClass(4, 8, 1024, 4096, 10))
    assert text.strip() == "ranks  all 12 need the same; 2 kinds compute differently, like ranks 0, 4"


def test_what_was_not_traced_is_said_to_be_so() -> None:
    text = printed(RankClass(0, 4, 1024, 4096, 10), RankClass(4, 4, 512))
    assert "not traced" in text and "hold no more than one that was" in text


def test_ranks_that_are_all_alike_take_a_line() -> None:
    assert printed(RankClass(0, 16384, 1, 1, 1)).splitlines()[0] == "ranks  all 16,384 hold and do the same"
    assert printed(RankClass(0, 1, 1, 1, 1)) == printed() == ""


@pytest.mark.parametrize("width", [40, 60, 100])
def test_many_classes_fit_and_are_counted(width: int) -> None:
    text = printed(*(RankClass(i, 1, 1000 - i, 5000 - i, 10) for i in range(40)), width=width)
    assert "(32 more)" in text and len(text.splitlines()) < 14
    assert max(map(len, text.splitlines())) <= width
