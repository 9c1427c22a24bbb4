"""What a job of a sweep asks Slurm for, and what is said where it can ask for nothing."""

from __future__ import annotations

import builtins
import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.training.job.slurm_jobs import CHOSEN, Size, more_words, size_of
from tests.recipes.runs import SMALL, entries, typed


@pytest.mark.parametrize(
    ("world", "parameters", "hardware", "device", "size"),
    [
        (4, {}, {}, "cpu", Size(1, 4, None)),
        (4, {}, {}, "auto", Size(1, 4, None)),  # nothing is known of GPUs
        (4, {}, {}, "cuda", Size(1, 4, 4)),
        (16, {}, {"devices_per_node": 8}, "auto", Size(2, 8, 8)),
        (12, {}, {"devices_per_node": 8}, "auto", Size(2, 6, 6)),
        (7, {}, {"devices_per_node": 4}, "auto", Size(7, 1, 1)),
        (16, {}, {"devices_per_node": 8}, "cpu", Size(2, 8, None)),
        (16, {"nodes": 4}, {"devices_per_node": 8}, "auto", Size(4, 4, 4)),
        (16, {"tasks_per_node": 2, "gpus_per_node": 0}, {"devices_per_node": 8}, "auto", Size(8, 2, 0)),
    ],
)
def test_a_jobs_size(
    world: int, parameters: dict[str, int], hardware: dict[str, int], device: str, size: Size
) -> None:
    assert size_of(world, parameters, hardware, device) == size


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 16))
def test_every_rank_has_a_task(world: int, devices: int) -> None:
    size = size_of(world, {}, {"devices_per_node": devices}, "auto")
    assert size.nodes * size.tasks == world
    assert size.tasks <= (devices or world)


@pytest.mark.parametrize(
    "parameters", [{"nodes": 3}, {"tasks_per_node": 3}, {"nodes": 2, "tasks_per_node": 4}]
)
def test_numbers_that_are_not_the_meshs_are_refused(parameters: dict[str, int]) -> None:
    with pytest.raises(LaunchError, match="are not the 16 ranks of the mesh"):
        size_of(16, parameters, {}, "cpu")


def test_one_run_is_a_sweep_of_one_job() -> None:
    assert more_words(["train.py", CHOSEN]) == ["hydra.mode=MULTIRUN"]
    assert more_words(["train.py", CHOSEN, "-m"]) == more_words(["train.py", "parallel=tp2"]) == []


@pytest.mark.ranks  # the command runs in a fork
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["parallel=tp22"], "error[unknown-preset]"),
        (["parallel=tp2", "rules=['layers.*: chekpoint']"], "error[unknown-style]"),
        (
            ["parallel=tp2", "hydra.launcher.nodes=4"],
            "error: 4 nodes of 0 tasks are not the 2 ranks of the mesh",
        ),
        (["parallel=tp2"], 'error: Slurm accepts no job: Could not detect "srun"'),
    ],
)
def test_a_sweep_that_cannot_be_submitted(
    arguments: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = typed(*SMALL, CHOSEN, *arguments, cwd=tmp_path)
    assert ended.status == 1
    assert what in ended.err and "Traceback" not in ended.err
    assert entries(tmp_path) == []


def test_without_submitit_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = importlib.import_module("parallelizer.training.job.slurm_launcher")
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "submitit":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    launcher = slurm.SlurmLauncher()
    launcher.setup(hydra_context=None, task_function=more_words, config=None)
    with pytest.raises(LaunchError, match="needs hydra-submitit-launcher") as caught:
        launcher.launch([["parallel=tp2"]], 0)
    assert caught.value.help == "pip install hydra-submitit-launcher submitit"
