"""What is left of a run that came to nothing, and what is not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.training.job.outcome import discard, tidy
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
