"""How many ranks a machine is given: its GPUs, or so many processes; many of them not without being asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from parallelizer.commands.new.create import create
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.training.job.ranks import check_gpus, check_processes, check_ranks
from parallelizer.training.settings import read_settings
from tests.simulate.setups import LLAMA

COMMAND = "-m my.train parallel=tp8"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def checked(*overrides: str, config_dir: str | None = None) -> None:
    composed = compose_config(list(overrides), config_dir)
    check_ranks(from_config(*composed), read_settings(*composed), None, "-m recipes.train")


def test_many_more_processes_than_cores_are_confirmed_first() -> None:
    checked(*LLAMA, "parallel=tp8_cp2", "device=cpu")
    many = (*LLAMA, "parallel=fsdp8_tp8", "device=cpu")
    with pytest.raises(LaunchError, match="64 processes on 2 cores") as caught:
        checked(*many)
    assert caught.value.help.startswith("to start them anyway, set launch.max_cpu_ranks=64")
    checked(*many, "launch.max_cpu_ranks=64")


def test_they_are_in_a_new_project_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaunchError, match="64 processes on 2 cores"):
        checked("parallel=fsdp8_tp8", "device=cpu", config_dir="conf")


def test_gpus_that_suffice_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    check_gpus(8, COMMAND)


@pytest.mark.parametrize(
    ("world_size", "gpus", "nodes", "per_node"), [(16, 8, 2, 8), (12, 8, 2, 6), (4, 1, 4, 1), (16, 0, 2, 8)]
)
def test_too_few_gpus_names_the_torchrun_command(
    world_size: int, gpus: int, nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(LaunchError) as caught:
        check_gpus(world_size, COMMAND)
    assert caught.value.message == (
        f"{world_size} ranks need {world_size} GPUs, and this machine has {gpus or 'none'}"
    )
    assert caught.value.help is not None
    assert f"torchrun --nnodes={nodes} --nproc-per-node={per_node} " in caught.value.help
    assert caught.value.help.count(COMMAND) == 1
    assert "device=cpu" in caught.value.help


def test_cpu_ranks_have_a_limit_that_names_the_alternatives() -> None:
    check_processes(64, 64, COMMAND)
    with pytest.raises(LaunchError, match=r"^65 ranks are more than the 64") as caught:
        check_processes(65, 64, COMMAND)
    assert "python -m parallelizer plan" in str(caught.value)
    assert "torchrun --nnodes=5 --nproc-per-node=13 " in str(caught.value)
    check_processes(65, 65, COMMAND)
