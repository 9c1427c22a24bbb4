"""Views with sizes that no plan can divide, and what could stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.propose.from_forward.counted import CountedView, reason


def view_of(line: str, folder: Path, dim: int, sizes: tuple[int | None, ...]) -> CountedView:
    path = folder / "nano.py"
    path.write_text(f"{line}\n")
    start = line.index("q.view") if "q.view" in line else line.index("y.")
    return CountedView(Span(str(path), 1, start + 1, line.rindex(")") + 2), dim, sizes)


@pytest.mark.parametrize(
    ("line", "dim", "edit"),
    [
        ("q = q.view(B, T, H, C // H)", -2, "view(B, T, -1, C // H)"),
        ("q = q.view((B, T, H, C // H))", -2, "view(B, T, -1, C // H)"),
        ("q = q.view(*x.shape[:2], H, C // H)", -2, "view(*x.shape[:2], -1, C // H)"),
    ],
)
def test_the_line_and_the_edit_are_said(line: str, dim: int, edit: str, tmp_path: Path) -> None:
    view = view_of(line, tmp_path, dim, (None, None, 4, 8))
    said = reason([view, view], "shape '[8, 64, 4, 8]' is invalid for input of size 8192 [does-not-run]")
    assert said is not None and said.count("nano.py:1") == 1
    assert f"which could be `{edit}`" in said


def test_another_failure_is_not_blamed_on_a_view(tmp_path: Path) -> None:
    view = view_of("q = q.view(B, T, H, C // H)", tmp_path, -2, (None, None, 4, 8))
    assert reason([view], "shape '[8, 64, 2, 16]' is invalid for input of size 8192") is None
    assert reason([], "[attention-shape]") is None
    assert reason([view], "it is given 4 query heads of size 4 [attention-shape]") is not None


def test_starred_sizes_behind_it_leave_the_edit_open(tmp_path: Path) -> None:
    view = view_of("q = q.view(B, H, *rest)", tmp_path, -2, (None, 4, 8))
    said = reason([view], "shape '[8, 4, 8]' is invalid")
    assert said is not None and "could be" not in said
