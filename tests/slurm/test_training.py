"""The recipe under a real Slurm: as tasks of a step, as one task that forks its ranks, preempted and requeued."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.recipes.runs import SMALL, entries, metrics, run_here
from tests.slurm.cluster import Slurm, wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 8
TRAIN = f"{sys.executable} -m recipes.train {shlex.join(SMALL)} train.steps=2"


def alone(folder: Path, steps: int = 2) -> list[float]:
    """The losses of one rank."""
    folder.mkdir()
    run_here(folder, f"train.steps={steps}", "train.log_every=0")
    return [m["loss"] for m in metrics(folder)]


def script(folder: Path, text: str) -> Path:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


def test_tasks_of_a_step_on_two_nodes_train_together(slurm: Slurm, tmp_path: Path) -> None:
    """Dealt to the nodes in turn: the ranks are counted node by node all the same, and tp stays inside."""
    step = f"srun -N2 --ntasks-per-node=2 --distribution=cyclic --wait=60 {TRAIN} parallel=fsdp2_tp2"
    job = slurm.submit(
        script(tmp_path, step), "-N2", "--ntasks-per-node=2", f"--output={tmp_path}/out", cwd=tmp_path
    )
    slurm.wait(job, timeout=300)
    out = (tmp_path / "out").read_text()
    assert out.count("mesh  4 ranks: dp_shard=2 x tp=2") == out.count("trained 2 steps") == 1
    assert "warning" not in out
    [folder] = tmp_path.glob("outputs/*")
    assert folder.name.startswith(f"slurm-{job}.0-")
    assert [name for name in entries(folder) if "/" not in name] == [".hydra", "metrics.jsonl"]
    assert [m["loss"] for m in metrics(folder)] == pytest.approx(alone(tmp_path / "alone"), rel=1e-5)


def test_a_job_of_one_task_forks_its_ranks(slurm: Slurm, tmp_path: Path) -> None:
    """In the script itself, and as a step of one task."""
    both = f"{TRAIN} parallel=tp2 && srun -n1 {TRAIN} parallel=tp2"
    job = slurm.submit(script(tmp_path, both), "-n2", "-N1", f"--output={tmp_path}/out", cwd=tmp_path)
    slurm.wait(job, timeout=300)
    folders = sorted(tmp_path.glob("outputs/*"))
    assert [folder.name[: len(f"slurm-{job}-")] for folder in folders] == [f"slurm-{job}-", f"slurm-{job}."]
    first, second = ([m["loss"] for m in metrics(folder)] for folder in folders)
    assert first == second == pytest.approx(alone(tmp_path / "alone"), rel=1e-5)


def test_a_batch_job_that_is_asked_to_stop_saves_is_requeued_and_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    """It ends with 75, which is in this cluster's RequeueExit."""
    step = f"srun --wait=60 {TRAIN} train.steps={STEPS} parallel=tp2"
    job = slurm.submit(
        script(tmp_path, step), "-n2", "-N1", f"--output={tmp_path}/out", "--open-mode=append", cwd=tmp_path
    )
    wait_for(lambda: any(tmp_path.glob("outputs/*/metrics.jsonl")), 240)
    slurm.run("scancel", "--signal=USR1", job)
    slurm.requeued(job, timeout=120)
    slurm.wait(job, timeout=300)
    [folder] = tmp_path.glob("outputs/*")
    measured = metrics(folder)
    assert [m["step"] for m in measured] == list(range(1, STEPS + 1))
    assert [m["loss"] for m in measured] == pytest.approx(alone(tmp_path / "alone", STEPS), rel=1e-5)
    out = (tmp_path / "out").read_text()
    assert out.count("resuming after step") == 1 and "Abort" not in out
