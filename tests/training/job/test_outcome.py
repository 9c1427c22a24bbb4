"""What is left of a run that came to nothing, and what is not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.training.job.outcome import discard, job_reported, tidy
from tests.recipes.runs import entries


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An output folder as Hydra makes it."""
    folder = tmp_path / "outputs" / "day" / "time"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text("a: 1")
    (folder / "train.log").write_text("something")
    return folder


def test_a_folder_without_results_goes_with_its_empty_parents(folder: Path, tmp_path: Path) -> None:
    (folder / "metrics.jsonl").touch()
    (folder / "rank1.log").touch()
    discard(folder)
    assert entries(tmp_path) == []


def test_the_parents_stay_for_other_runs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs" / "day" / "earlier").mkdir()
    discard(folder)
    assert entries(tmp_path) == ["outputs", "outputs/day", "outputs/day/earlier"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rank1.log", "notes.txt"])
def test_a_folder_with_something_in_it_stays(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).write_text("something")
    before = entries(tmp_path)
    discard(folder)
    assert entries(tmp_path) == before


def test_a_folder_with_folders_of_others_stays(folder: Path, tmp_path: Path) -> None:
    (folder / "checkpoints").mkdir()
    before = entries(tmp_path)
    discard(folder)
    assert entries(tmp_path) == before


def test_what_else_was_made_is_said_by_patterns(folder: Path, tmp_path: Path) -> None:
    (folder / "rank1.log").write_text("something")
    discard(folder, made=[".hydra", "*.log"])
    assert entries(tmp_path) == []


def test_a_folder_that_is_not_there_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    discard(tmp_path / "outputs" / "day")
    assert entries(tmp_path) == ["outputs"]


def test_tidying_leaves_the_logs_that_say_something(folder: Path) -> None:
    (folder / "rank1.log").touch()
    (folder / "rank2.log").write_text("something")
    (folder / "metrics.jsonl").touch()
    tidy(folder)
    assert sorted(p.name for p in folder.iterdir()) == [".hydra", "metrics.jsonl", "rank2.log", "train.log"]


@pytest.mark.parametrize("chosen", [False, True])
def test_an_interrupted_run_names_its_checkpoint_and_the_command_that_goes_on(
    chosen: bool, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parents[2])
    (folder / "metrics.jsonl").write_text("{}")
    command = "-m recipes.train parallel=tp2" + " hydra.run.dir=runs/a" * chosen
    with pytest.raises(SystemExit) as ended, job_reported(folder, False, None, command):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert "no checkpoint was saved: train.checkpoint_every=N saves one" in capsys.readouterr().err
    for step in (10, 20):
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    with pytest.raises(SystemExit), job_reported(folder, False, None, command):
        raise KeyboardInterrupt
    told = capsys.readouterr().err.splitlines()
    assert (
        "the checkpoint of step 20 is complete, outputs/day/time/checkpoints/step_20; this command resumes"
        in told[-2]
    )
    assert told[-1] == f"  python {command}" + " hydra.run.dir=outputs/day/time" * (not chosen)
