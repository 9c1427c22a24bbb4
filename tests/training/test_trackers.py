"""Who is told what a run measures: every step once, also after a resume; and a failure there is none of the run."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.trackers import TRACKERS, Trackers, missing
from tests.recipes.runs import SMALL, run_here, typed

VALUES = {"loss": 2.5, "lr": 1e-3}


class Kept:
    """A tracker that remembers, and fails where a test says so."""

    fails = ""
    told: list[Any]

    def __init__(self) -> None:
        type(self).told = []

    def open(self, config: Mapping[str, Any], folder: Path, done: int) -> None:
        self._say("open", config, folder, done)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._say("write", step, dict(values))

    def close(self, status: str) -> None:
        self._say("close", status)

    def _say(self, what: str, *told: Any) -> None:
        if what == self.fails:
            raise OSError("no space left on device")
        self.told.append((what, *told))


class Failing(Kept):
    """One that fails."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "kept", Kept)
    monkeypatch.setitem(TRACKERS, "failing", Failing)


def test_it_is_opened_told_and_closed_in_turn(kept: None, tmp_path: Path) -> None:
    with Trackers(["kept"], {"a": 1}, tmp_path, 4) as trackers:
        trackers.write(5, VALUES)
        trackers.status = "stopped"
    assert Kept.told == [("open", {"a": 1}, tmp_path, 4), ("write", 5, VALUES), ("close", "stopped")]


def test_an_exception_of_the_run_is_told_and_goes_on(kept: None, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Trackers(["kept"], {}, tmp_path, 0):
        raise ZeroDivisionError
    assert Kept.told[-1] == ("close", "failed")


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_one_that_fails_warns_once_and_the_others_go_on(
    where: str,
    kept: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Failing, "fails", where)
    with Trackers(["failing", "kept"], {}, tmp_path, 0) as trackers:
        for step in (1, 2, 3):
            trackers.write(step, VALUES)
    warned = capsys.readouterr().err
    assert warned.count("warning[tracker-failed]") == 1 and "failing" in warned and "no space left" in warned
    assert [told[0] for told in Kept.told] == ["open", "write", "write", "write", "close"]


def test_a_package_that_is_not_there_is_told_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("parallelizer.training.trackers.importlib.util.find_spec", lambda name: None)
    [found] = missing(["wandb"], None)
    assert found.code == "tracker-missing" and "pip install wandb" in (found.help or "")
    with pytest.raises(PlanError) as error:
        run_here(tmp_path, "train.trackers=[tensorboard]", "train.steps=1")
    [found] = error.value.diagnostics
    assert found.code == "tracker-missing" and found.span is not None
    assert found.span.file == "<override train.trackers=[tensorboard]>"


@pytest.mark.ranks
def test_tensorboard_has_each_step_once_after_a_run_that_went_on(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = ("train.trackers=[tensorboard]", "train.checkpoint_every=2", "train.log_every=0")
    run_here(tmp_path, *options, "train.steps=4")
    # As a run that was killed behind step 4 and goes on behind step 2.
    shutil.rmtree(tmp_path / "checkpoints" / "step_4")
    run_here(tmp_path, *options, "train.steps=5")
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in read.Scalars("loss")] == [1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [e.value for e in read.Scalars("loss")] == pytest.approx([line["loss"] for line in lines])
    assert {"grad_norm", "lr", "tokens_per_second", "validation_loss"} <= set(read.Tags()["scalars"])


OWN = """
from pathlib import Path
from parallelizer import training

class Notes:
    def open(self, config, folder, done):
        self.file = Path(folder) / "notes.txt"
    def write(self, step, values):
        with self.file.open("a") as opened:
            opened.write(f"{step} {values['loss']:.2f}\\n")
    def close(self, status):
        with self.file.open("a") as opened:
            opened.write(status)

training.TRACKERS["notes"] = Notes
"""


@pytest.mark.ranks
def test_one_s_own_is_added_by_a_module_that_imports_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = (*SMALL, "imports=[my_trackers]", "train.trackers=[notes]")
    ended = typed("validate", "--no-proof", *words, cwd=tmp_path, module="parallelizer")
    assert ended.status == 0, ended.err
    ended = typed(*words, "train.steps=2", "hydra.run.dir=a", cwd=tmp_path)
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    written = [f"{line['step']} {line['loss']:.2f}" for line in lines]
    assert (tmp_path / "a/notes.txt").read_text().splitlines() == [*written, "finished"]


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is no record
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


@pytest.mark.ranks
@pytest.mark.slow
def test_wandb_goes_on_with_its_run_and_has_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    options = (*SMALL, "train.trackers=[wandb]", "train.checkpoint_every=2", "hydra.run.dir=a")
    for steps in (2, 3, 5):
        assert typed(*options, f"train.steps={steps}", cwd=tmp_path, timeout=120).status == 0
        known = json.loads((tmp_path / "a" / "wandb.json").read_text())
        assert known["step"] == steps
        if steps == 3:  # as one that was killed before it was saved: step 3 is done again
            shutil.rmtree(tmp_path / "a" / "checkpoints" / "step_3")
    steps_written = []
    files = sorted((tmp_path / "a" / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.stem for path in files} == {f"run-{known['id']}"}
    for path in files:
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("history"):
                steps_written.append(record.history.step.num)
    assert steps_written == [1, 2, 3, 4, 5]
