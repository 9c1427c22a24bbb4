"""A run is called the same when torchrun or Slurm starts it again, and otherwise by the time of its start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import datetime, timedelta

import pytest
from omegaconf import OmegaConf

from parallelizer.training.job.run_name import FORMAT, register, run_name
from tests.recipes.runs import ROOT

BATCH = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0"}


@pytest.fixture(autouse=True)
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name == "ENVIRONMENT":
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["train.py", "parallel=tp2"])
    return monkeypatch


def set_all(env: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        env.setenv(name, value)


def test_a_run_alone_is_called_by_the_time() -> None:
    register()
    named = OmegaConf.to_container(OmegaConf.create({"dir": "outputs/${run_name:}"}), resolve=True)["dir"]  # type: ignore[index,call-overload]
    began = datetime.strptime(named, f"outputs/{FORMAT}")
    assert datetime.now() - began < timedelta(seconds=5)


def test_a_step_of_a_batch_job_is_called_by_its_numbers_and_its_command(env: pytest.MonkeyPatch) -> None:
    set_all(env, BATCH)
    first = run_name()
    assert re.fullmatch(r"slurm-123\.0-[0-9a-f]{8}", first)
    env.setenv("SLURM_RESTART_COUNT", "1")
    assert run_name() == first
    env.setattr(sys, "argv", ["train.py", "parallel=tp4"])
    assert run_name() != first
    env.setenv("SLURM_STEP_ID", "1")
    assert run_name().startswith("slurm-123.1-")
    env.delenv("SLURM_STEP_ID")
    assert run_name().startswith("slurm-123-")
    set_all(env, {"SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "4"})
    assert run_name().startswith("slurm-120_4-")


def test_a_step_of_no_batch_job_is_called_by_the_time(env: pytest.MonkeyPatch) -> None:
    set_all(env, {name: value for name, value in BATCH.items() if name != "ENVIRONMENT"})
    assert not run_name().startswith("slurm")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it")
def test_ranks_of_torchrun_are_called_by_the_time_at_which_it_began(env: pytest.MonkeyPatch) -> None:
    """Started one after the other by one process, one of them with a shell in between."""
    env.setenv("PYTHONPATH", str(ROOT))
    shown = [
        sys.executable,
        "-c",
        "from parallelizer.training.job.run_name import run_name; print(run_name())",
    ]
    outer = [sys.executable, "-c", AGENT, *shown]
    before = datetime.now() - timedelta(seconds=2)
    names = subprocess.run(outer, capture_output=True, text=True, check=True).stdout.split()
    assert len(names) == 2 and len(set(names)) == 1
    assert before < datetime.strptime(names[0], FORMAT) <= datetime.now()


# What torch elastic's agent does for its workers: the variable is theirs, not its own.
AGENT = """
import os, subprocess, sys, time
environment = os.environ | {"TORCHELASTIC_RUN_ID": "none"}
through_a_shell = ["sh", "-c", '"$@"; true', "sh", *sys.argv[1:]]
for words in (sys.argv[1:], through_a_shell):
    subprocess.run(words, env=environment, check=True)
    time.sleep(1.1)  # longer than what names tell apart
"""
