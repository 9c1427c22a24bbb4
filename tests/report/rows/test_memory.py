"""The rows of memory: kinds at the peak, and the fullest moment of each phase."""

from __future__ import annotations

from parallelizer.report.rows.memory import highest_by_phase, memory_rows, phase_runs
from parallelizer.simulate.record.memory import CATEGORIES, MemoryChange, Point, usage


def _point(total: int, phase: str, module: str = "") -> Point:
    return Point(phase, module, total, {"activations": total})


def test_the_kinds_at_the_peak_add_up_to_it() -> None:
    before = {**dict.fromkeys(CATEGORIES, 0), "parameters": 16}
    changes = [
        MemoryChange(9, "activations", "forward", "a"),
        MemoryChange(-9, "activations", "backward", "b"),
        MemoryChange(5, "gradients", "backward", "c"),
    ]
    found = usage(before, changes)
    rows = memory_rows(found, CATEGORIES, found.course)
    assert sum(row.held for row in rows) == found.peak == 25
    by_kind = {row.kind: (row.held, row.most) for row in rows}
    assert by_kind["gradients"] == (0, 5) and by_kind["activations"] == (9, 9)
    assert [row.kind for row in memory_rows(found, ["batch", "parameters"])] == ["batch", "parameters"]


def test_what_lies_between_phases_belongs_to_the_one_before_and_at_the_start_to_the_first() -> None:
    course = [_point(1, ""), _point(2, "forward"), _point(9, ""), _point(3, "loss"), _point(4, "backward")]
    runs = phase_runs(course)
    assert [(phase, len(points)) for phase, points in runs] == [("forward", 3), ("loss", 1), ("backward", 1)]
    assert [p for _, points in runs for p in points] == course


def test_phases_that_come_again_are_one() -> None:
    course = [_point(i + 1, phase, f"m{i}") for i in range(3) for phase in ("forward", "backward")]
    highest = highest_by_phase(phase_runs(course))
    assert {phase: (p.total, p.module) for phase, p in highest.items()} == {
        "forward": (3, "m2"),
        "backward": (3, "m2"),
    }
