"""Outcomes that a file keeps."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.search.kept import Kept


def test_what_is_kept_is_not_made_again(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    made: list[str] = []

    def make() -> dict[str, int]:
        made.append("once")
        return {"seconds": 3}

    for _ in range(2):
        assert Kept(file).of("a case", make) == {"seconds": 3}
    assert made == ["once"]
    assert Kept(None).of("a case", make) == {"seconds": 3}
    assert made == ["once", "once"]


def test_what_was_kept_with_another_version_of_the_package_is_stale(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    Kept(file).of("a case", lambda: 1)
    assert Kept(file).stale == []
    name, outcome, _ = json.loads(file.read_text())
    file.write_text(json.dumps([name, outcome, "another"]) + "\n")
    assert Kept(file).stale == ["a case"]
