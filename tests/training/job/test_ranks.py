"""How many processes a machine is given without being asked for."""

from __future__ import annotations

import os

import pytest

from parallelizer.configuration.setup import Setup
from parallelizer.runtime.launch.launcher import LaunchError
from parallelizer.training.job.ranks import check_ranks
from parallelizer.training.settings import Settings
from tests.simulate.setups import llama


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def checked(setup: Setup) -> None:
    check_ranks(setup, Settings(), None, "-m recipes.train")


def test_many_more_processes_than_cores_are_confirmed_first() -> None:
    checked(llama("parallel=tp8_cp2", "device=cpu"))
    many = ("parallel=fsdp8_tp8", "device=cpu")
    with pytest.raises(LaunchError, match="64 processes on 2 cores") as caught:
        checked(llama(*many))
    assert caught.value.help.startswith("to start them all the same, set launch.max_cpu_ranks=64")
    checked(llama(*many, "launch.max_cpu_ranks=64"))
