"""Checkpoints that are broken, or of something else: by code, what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.runtime.checkpoint.choose import CheckpointPlace, choose
from parallelizer.runtime.checkpoint.loading import load_checkpoint
from parallelizer.runtime.checkpoint.lock import hold
from parallelizer.runtime.checkpoint.saving import Checkpoints, save_checkpoint


def report(code: str, here: Path) -> Iterable[Diagnostic]:
    """The findings for a checkpoint that is broken so."""
    return _BROKEN[code](here)


def _saved(here: Path) -> Path:
    """The checkpoint of a linear layer and its AdamW behind one step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return save_checkpoint(here / "checkpoints", 1, model, optimizer)


def _of(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterable[Diagnostic]:
    try:
        load_checkpoint(path, model, optimizer)
    except PlanError as error:
        return error.diagnostics
    return ()


def _damaged(here: Path) -> Iterable[Diagnostic]:
    path = _saved(here)
    (path / "__0_0.distcp").write_bytes(b"")
    return _of(path, nn.Linear(3, 2))


def _other_optimizer(here: Path) -> Iterable[Diagnostic]:
    model = nn.Linear(3, 2)
    return _of(_saved(here), model, torch.optim.SGD(model.parameters(), lr=0.1))


def _start(here: Path, resume: str) -> Iterable[Diagnostic]:
    place = CheckpointPlace(here / "checkpoints", Path(resume) if resume != "never" else None)
    try:
        choose(place, anew=resume == "never", span=None)
    except PlanError as error:
        return error.diagnostics
    return ()


def _exists(here: Path) -> Iterable[Diagnostic]:
    _saved(here)
    return _start(here, "never")


def _in_use(here: Path) -> Iterable[Diagnostic]:
    with closing(hold(here / "checkpoints")):  # type: ignore[type-var]
        try:
            hold(here / "checkpoints")
        except PlanError as error:
            return error.diagnostics
    return ()


def _unwritable(here: Path) -> Iterable[Diagnostic]:
    (here / "file").touch()
    checkpoints = Checkpoints(here / "file")
    checkpoints.save(1, nn.Linear(3, 2))
    checkpoints.wait()
    return [ended.failure for ended in checkpoints.ended() if ended.failure is not None]


_BROKEN: dict[str, Callable[[Path], Iterable[Diagnostic]]] = {
    "checkpoint-damaged": _damaged,
    "checkpoint-dtype": lambda here: _of(_saved(here), nn.Linear(3, 2).to(torch.bfloat16)),
    "checkpoint-exists": _exists,
    "checkpoint-in-use": _in_use,
    "checkpoint-mismatch": lambda here: _of(_saved(here), nn.Linear(4, 2)),
    "checkpoint-not-found": lambda here: _start(here, str(here / "nowhere")),
    "checkpoint-optimizer": _other_optimizer,
    "checkpoint-unwritable": _unwritable,
}
