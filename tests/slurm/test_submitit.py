"""`hydra/launcher=submitit_slurm` with a real Slurm: sweeps, single runs, jobs that fail, jobs that are preempted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallelizer.training.job.slurm_jobs import CHOSEN, MANY
from tests.recipes.runs import SMALL, entries, metrics, run_here
from tests.slurm.cluster import Slurm, wait_for

pytest.importorskip("submitit", reason="the optional extra `slurm`")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 12


def submitting(slurm: Slurm, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "recipes.train",
            *MANY.intersection(overrides),
            *SMALL,
            CHOSEN,
            *(word for word in overrides if word not in MANY),
        ],
        cwd=folder,
        env=slurm.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alone(folder: Path, steps: int) -> list[float]:
    folder.mkdir()
    run_here(folder, f"train.steps={steps}", "train.log_every=0")
    return [m["loss"] for m in metrics(folder)]


def test_jobs_of_a_sweep_have_as_many_tasks_as_their_meshes_have_ranks(slurm: Slurm, tmp_path: Path) -> None:
    with submitting(
        slurm, tmp_path, "-m", "parallel=single,tp2", "train.steps=2", "+hardware.devices_per_node=1"
    ) as command:
        out, err = command.communicate(timeout=300)
    assert command.returncode == 0, err
    assert "1 task on 1 node" in out and "2 tasks on 2 nodes" in out
    [sweep] = tmp_path.glob("multirun/*/*")
    for number in ("0", "1"):
        assert [n for n in entries(sweep / number) if "/" not in n] == [
            ".hydra",
            "metrics.jsonl",
            "train.log",
        ]
    first, second = ([m["loss"] for m in metrics(sweep / number)] for number in ("0", "1"))
    assert first == pytest.approx(second, rel=1e-5)


def test_a_job_that_is_preempted_goes_on_from_its_checkpoint(slurm: Slurm, tmp_path: Path) -> None:
    command = submitting(
        slurm, tmp_path, "parallel=tp2", f"train.steps={STEPS}", "train.checkpoint_every=1",
        "hydra.sweep.dir=sweep",
    )  # fmt: skip
    with command:
        assert command.stdout is not None
        first_line = command.stdout.readline()
        assert first_line.startswith("job "), command.communicate()
        job = first_line.split()[1].rstrip(":")
        checkpoints = tmp_path / "sweep" / "0" / "checkpoints"
        wait_for(lambda: (checkpoints / "step_1").exists(), 240)
        slurm.run("scancel", "--signal=USR2", job)
        slurm.requeued(job, timeout=120)
        _, err = command.communicate(timeout=300)
    assert command.returncode == 0, err
    measured = metrics(tmp_path / "sweep" / "0")
    assert [m["step"] for m in measured] == list(range(1, STEPS + 1))
    assert [m["loss"] for m in measured] == pytest.approx(alone(tmp_path / "alone", STEPS), rel=1e-5)
    log = (tmp_path / "sweep" / ".submitit" / job / f"{job}_0_log.out").read_text()
    assert log.count("resuming after step") == 1


def test_a_job_that_fails_says_where_it_is_told_why(slurm: Slurm, tmp_path: Path) -> None:
    with submitting(
        slurm, tmp_path, "parallel=tp2", "data.path=/nowhere", "hydra.sweep.dir=sweep"
    ) as command:
        _, err = command.communicate(timeout=300)
    assert command.returncode == 1
    assert "Traceback" not in err
    assert "failed: see " in err
    [log] = (tmp_path / "sweep" / ".submitit").glob("*/*_0_log.err")
    assert "error[data-not-found]" in log.read_text()
