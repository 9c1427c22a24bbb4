"""Which checkpoint a run starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint.choose import CheckpointPlace, choose, unwritable
from parallelizer.runtime.checkpoint.manifest import NAME
from parallelizer.runtime.checkpoint.saving import save_checkpoint


def saved(folder: Path, *steps: int) -> Path:
    model = nn.Linear(2, 2)
    for step in steps:
        save_checkpoint(folder, step, model, torch.optim.SGD(model.parameters()))
    return folder


def chosen(own: Path, given: Path | None = None, *, anew: bool = False) -> Path | None:
    opened = choose(CheckpointPlace(own, given), anew=anew, span=None)
    return None if opened is None else opened.path


def refused(own: Path, given: Path | None = None, *, anew: bool = False) -> str:
    with pytest.raises(PlanError) as caught:
        chosen(own, given, anew=anew)
    return caught.value.diagnostics[0].code


def test_a_run_goes_on_from_its_own_newest_whose_index_is_whole(tmp_path: Path) -> None:
    own, other = saved(tmp_path / "own", 1, 2, 3), saved(tmp_path / "other", 9)
    assert chosen(own) == chosen(own, other) == own / "step_3"
    (own / "step_3" / NAME).write_text("{}")
    assert chosen(own) == own / "step_2"
    assert refused(own, anew=True) == "checkpoint-exists"


def test_without_any_of_its_own_it_starts_from_the_given_one(tmp_path: Path) -> None:
    own, run = tmp_path / "own", tmp_path / "run"
    assert chosen(own) is None and chosen(own, anew=True) is None
    checkpoints = saved(run / "checkpoints", 1, 4)
    for given in (run, checkpoints, checkpoints / "step_4"):
        assert chosen(own, given) == checkpoints / "step_4"
    (checkpoints / "step_4" / NAME).write_text("{}")
    assert refused(own, run) == "checkpoint-damaged"
    assert refused(own, tmp_path / "nowhere") == "checkpoint-not-found"


def test_a_file_holds_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert unwritable(tmp_path / "new" / "folder", None) == []
    [found] = unwritable(tmp_path / "file" / "new", None)
    assert found.code == "checkpoint-unwritable" and found.message.endswith("is no folder")
