"""Kept texts: a difference is shown, a flag accepts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import UPDATE, same


def test_a_difference_is_shown_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UPDATE, raising=False)
    file = tmp_path / "kept.txt"
    file.write_text("a\nb\n")
    same("a\nb\n", file)
    with pytest.raises(AssertionError, match=r"-b\n\+c"):
        same("a\nc\n", file)
    with pytest.raises(AssertionError, match="UPDATE_SNAPSHOTS=1 accepts it"):
        same("a\n", tmp_path / "none.txt")
    assert file.read_text() == "a\nb\n"


def test_the_flag_accepts_what_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UPDATE, "1")
    same("new\n", tmp_path / "folder" / "kept.txt")
    monkeypatch.setenv(UPDATE, "0")
    same("new\n", tmp_path / "folder" / "kept.txt")
