"""The rows of rank classes hold every rank once, and part where a figure does."""

from __future__ import annotations

from parallelizer.report.rows.rank_classes import rank_class_rows
from parallelizer.simulate.record.rank_classes import RankClass


def test_classes_of_equal_figures_are_one_row() -> None:
    classes = [
        RankClass(0, 4, 1024, 4096, 10),
        RankClass(4, 8, 1024, 4096, 10),
        RankClass(12, 4, 1024),
    ]
    rows = rank_class_rows(classes)
    assert [(row.like, row.ranks) for row in rows] == [((0, 4), 12), ((12,), 4)]
    assert sum(row.ranks for row in rows) == sum(c.ranks for c in classes)
    assert (rows[0].parameters_bytes, rows[0].peak, rows[0].sent_bytes) == (1024, 4096, 10)
    assert (rows[1].peak, rows[1].sent_bytes) == (None, None)
