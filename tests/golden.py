"""Texts that are kept in files and compared character by character.

`UPDATE_SNAPSHOTS=1 python -m pytest ...` writes what is printed today; the difference is then read in the commit.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

UPDATE = "UPDATE_SNAPSHOTS"


def same(text: str, file: Path) -> None:
    """Fail unless a file holds exactly this text; with the environment's flag write it there."""
    if os.environ.get(UPDATE, "") not in ("", "0"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return
    kept = file.read_text() if file.is_file() else ""
    if kept != text:
        lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), str(file), "now", lineterm="")
        raise AssertionError("\n".join([f"{UPDATE}=1 accepts it:", *lines]))
