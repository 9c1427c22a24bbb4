"""`parallelizer new`: what it prints, and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.commands.main import main


def test_the_command_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    out = capsys.readouterr().out
    assert "cd mine" in out and "parallelizer validate --config-dir conf" in out
    assert main(["new", "mine"]) == 1
    assert main(["new", "one", "two"]) == 2
    assert not (tmp_path / "one").exists()
