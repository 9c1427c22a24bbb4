"""Which checkpoint a run starts from: the newest of its own, else the one that it was given; and whether it can write more."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.language.yaml_nodes import shown_path
from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint.loading import Opened, open_checkpoint


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a run's checkpoints go, and the one that it was told to start from."""

    folder: Path
    given: Path | None = None


def choose(place: CheckpointPlace, *, anew: bool, span: Span | None) -> Opened | None:
    """The checkpoint to start from, as far as indices tell: of the run's own the newest whose index is whole (the ranks
    look at the rest), else the given one; None where there is none. `span` is where train.resume is set.

    Raises PlanError: `checkpoint-exists` for a run that begins `anew` and has some, and what is wrong with the given one.
    """
    own = names.steps_in(place.folder)
    if anew and own:
        message = f"{place.folder} holds checkpoints already, up to step {own[-1]}"
        help_text = (
            "train.resume=auto resumes from there; to start a new run, choose another train.checkpoint_dir or "
            "hydra.run.dir"
        )
        raise PlanError([Diagnostic("checkpoint-exists", message, span, help_text)])
    paths = [place.folder / names.name(step) for step in reversed(own)]
    if not own and place.given is not None:
        paths = [names.resolved(place.given, span)]
    for path in paths:
        try:
            return open_checkpoint(path)
        except PlanError:
            if not own:
                raise
    return None


def unwritable(folder: Path, span: Span | None) -> list[Diagnostic]:
    """Whether a folder can neither be used nor be made, as far as that can be told without making it. `span` is where
    train.checkpoint_dir is set.
    """
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return []
    why = "may not be written to" if there.is_dir() else "is no folder"
    message = f"no checkpoint can be written into {shown_path(folder)}: {shown_path(there)} {why}"
    return [Diagnostic("checkpoint-unwritable", message, span, "give another train.checkpoint_dir")]
