"""What cannot be written is told before the work, as it would be after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.report.targets import check_targets


def test_a_file_that_can_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.html").write_text("")
    check_targets(tmp_path / "there.html", tmp_path / "new.lock")
    monkeypatch.chdir(tmp_path)
    check_targets("new.html", None)
    assert not (tmp_path / "new.html").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/such/x", "there is no folder"),
        ("", "it is a folder"),
        ("file/x", "there is no folder"),
        ("a\0b", "null"),
    ],
)
def test_both_files_are_looked_at(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError) as caught:
        check_targets(f"{tmp_path}/{name}", f"{tmp_path}/{name}")
    found = caught.value.diagnostics
    assert [d.code for d in found] == ["file-unwritable", "lock-not-written"]
    assert len(found) == 2 and all(reason in d.message and d.help for d in found)
