"""The checkpoints in a folder: their names, the newest, and those to keep.

step_40         complete: a checkpoint gets this name only after it has been read back
step_60.tmp     being written, or left by a run that was killed
step_20.old     being removed
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span

SUBFOLDER = "checkpoints"
"""Where they lie in a run's output folder, if nothing else is said."""

UNFINISHED, LEAVING, REPLACED = ".tmp", ".old", ".was"


def name(step: int) -> str:
    """The name of the checkpoint behind so many steps."""
    return f"step_{step}"


def step_of(path: Path) -> int | None:
    """How many steps a checkpoint's folder says that it has; None for any other folder."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[int]:
    """The steps of the finished checkpoints, from the first to the last."""
    if not folder.is_dir():
        return []
    return sorted(step for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir())


def resolved(path: Path, span: Span | None = None, key: str = "train.resume") -> Path:
    """The newest checkpoint of a folder of them, or of a run's output folder; the path itself where it is neither. Raises
    PlanError `checkpoint-not-found` where there is nothing.
    """
    for folder in (path, path / SUBFOLDER):
        if steps := steps_in(folder):
            return folder / name(steps[-1])
    if not path.exists():
        message = f"{key}={path} does not exist"
        help_text = "give a checkpoint (a folder step_<N>), a folder of them, or the output folder of a run"
        help_text += "; auto; never" if key == "train.resume" else "; or a saved model"
        raise PlanError([Diagnostic("checkpoint-not-found", message, span, help_text)])
    return path


def leftovers(folder: Path) -> list[Path]:
    """What runs that were killed left behind: checkpoints half written or half removed."""
    if not folder.is_dir():
        return []
    return sorted(
        p for p in folder.iterdir() if re.fullmatch(rf"step_\d+({UNFINISHED}|{LEAVING}|{REPLACED})", p.name)
    )


def tidy(folder: Path) -> None:
    """Remove what is half written and half removed, as far as that can be, and put back what was to be replaced and has
    not been. Do not call it while a run saves into the folder.
    """
    for path in leftovers(folder):
        if path.suffix == REPLACED and not path.with_suffix("").exists():
            path.rename(path.with_suffix(""))
            continue
        shutil.rmtree(path, ignore_errors=True)


def to_remove(steps: Sequence[int], *, keep_last: int, keep_every: int) -> list[int]:
    """Which checkpoints may go: not the `keep_last` newest, nor those of a multiple of `keep_every` steps (0: of none).

    The newest one always stays.
    """
    newest = set(sorted(steps)[-max(1, keep_last) :])
    return [s for s in sorted(steps) if s not in newest and not (keep_every and s % keep_every == 0)]


def remove(folder: Path, steps: Iterable[int]) -> None:
    """Remove checkpoints. Each loses its name first, so that none is ever half there under it. OSError as of the system."""
    for step in steps:
        leaving = folder / f"{name(step)}{LEAVING}"
        (folder / name(step)).rename(leaving)
        shutil.rmtree(leaving)


def finish(unfinished: Path) -> Path:
    """Give a checkpoint its name, and see that onto the disk: files, folder, and the folder's entry. Another one of that name
    is removed behind that. OSError as of the system.
    """
    done = unfinished.with_suffix("")
    was = done.with_suffix(REPLACED)
    _sync(unfinished)
    if done.exists():
        done.rename(was)
    unfinished.rename(done)
    _sync(done.parent)
    shutil.rmtree(was, ignore_errors=True)
    return done


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
