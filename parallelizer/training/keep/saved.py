"""Checks whether this run has saved its trained model already, for a finished run that is started again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

NOTE = "saved.json"
"""A file of the output folder, written behind the model."""


def note_saved(output: Path, model: Path, steps: int) -> None:
    """The model of a run of so many steps is whole in a folder."""
    text = json.dumps({"folder": str(model.absolute()), "steps": steps}) + "\n"
    (output / NOTE).write_text(text, encoding="utf-8")


def wrote(output: Path, model: Path) -> bool:
    """Whether this run has saved its model in that folder before, behind however many steps."""
    known = _known(output)
    return known.get("folder") == str(model.absolute()) and model.is_dir()


def has_saved(output: Path, model: Path, steps: int) -> bool:
    """Whether this run's model, of so many steps, is in that folder."""
    return wrote(output, model) and _known(output).get("steps") == steps


def _known(output: Path) -> dict[str, Any]:
    known = None
    with suppress(OSError, ValueError):
        known = json.loads((output / NOTE).read_text(encoding="utf-8"))
    return known if isinstance(known, dict) else {}
