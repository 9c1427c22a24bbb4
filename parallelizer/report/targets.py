"""Files that a command is to write, looked at before the work whose result they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError


def check_targets(html: str | Path | None, lock: str | Path | None) -> None:
    """Raises PlanError for a page or a lock that cannot be written, as writing it would at the end."""
    advice = "name a file in a folder that exists and that you may write to"
    found = []
    if html is not None and (reason := _obstacle(html)):
        found.append(Diagnostic("file-unwritable", f"cannot write {html}: {reason}", None, advice))
    if lock is not None and (reason := _obstacle(lock)):
        found.append(Diagnostic("lock-not-written", f"{lock} cannot be written: {reason}", None, advice))
    if found:
        raise PlanError(found)


def refuse_existing(path: str | Path | None, *, force: bool) -> None:
    """Raises PlanError for a file that exists, unless it may be overwritten: people edit what a command has written."""
    if path is not None and not force and os.path.lexists(path):
        advice = "name another file, or overwrite it with --force"
        raise PlanError([Diagnostic("file-unwritable", f"{path} exists already", None, advice)])


def _obstacle(path: str | Path) -> str | None:
    """Why no file can be put at a path; None if nothing is known to stand in the way."""
    try:
        target = os.path.realpath(path)
        folder = os.path.dirname(target)
        if os.path.isdir(target):
            return "it is a folder"
        if os.path.lexists(target) and not os.path.isfile(target):
            return "it is there and is not a file"
        if not os.path.isdir(folder):
            return f"there is no folder {os.path.dirname(path) or folder} (`mkdir -p` makes it)"
    except (OSError, ValueError) as error:  # a name that no file can have
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else f"nothing can be made in {folder}"
