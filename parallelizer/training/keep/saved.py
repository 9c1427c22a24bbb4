"""Checks whether this run has saved its trained model already, for a finished run that is started again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

NOTE = "saved.json"
"""A file of the output folder, written behind the model."""


def note_saved(output: Path, model: Path, steps: int) -> None:
    """The model of a run of so many steps is whole in a folder."""
    text = json.dumps({"folder": str(model.absolute()), "steps": steps}) + "\n"
    (output / NOTE).write_text(text, encoding="utf-8")


def saved_steps(output: Path, model: Path) -> int | None:
    """Behind how many steps this run has saved its model in that folder; None when it has not, or the folder is gone."""
    known = None
    with suppress(OSError, ValueError):
        known = json.loads((output / NOTE).read_text(encoding="utf-8"))
    if not isinstance(known, dict) or known.get("folder") != str(model.absolute()) or not model.is_dir():
        return None
    return int(known.get("steps", 0))
