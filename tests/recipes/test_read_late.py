"""The recipe reads a step while the device computes the next one: what it writes, reports and leaves behind is what it would be
if each step was read at once.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.launch import launcher as launch
from parallelizer.runtime.taken_step import Step
from parallelizer.training.guards import Guards
from parallelizer.training.job.job import Job
from parallelizer.training.job.prepare import prepare
from recipes import train
from tests.chosen import chosen
from tests.recipes.runs import SMALL, metrics, run_here
from tests.runtime.guards.planted import digest

pytestmark = pytest.mark.ranks

BAD = 4
"""The step in which the last rank's loss is NaN, or in which rank 1 is asked to stop."""


def at_once() -> Any:
    """Every step is read before the next one begins."""
    return mock.patch.object(Guards, "at_once", lambda guards, step: True)


def run(folder: Path, worker: Any, *overrides: str) -> list[Any]:
    job = prepare(*compose_config([*SMALL, *overrides]), folder)
    ranks = job.setup.mesh.world_size
    return launch.start(worker, (job,), ranks=ranks, device="cpu", start_timeout=60, collective_timeout=60)


def spoilt(job: Job, immediately: bool) -> dict[str, Any]:
    """A run with a step that is not finite on the last rank: what it says, and what is there before that step and at the end."""
    taken: list[Step] = []
    digests: list[str] = []
    there: list[Any] = []

    def step(model: Any, parts: Any, loss: Any, optimizer: Any, *args: Any, **more: Any) -> Step:
        there[:] = model, optimizer
        digests.append(digest(model, optimizer))

        def planted(output: Any, batch: Any) -> Any:
            total, weight = loss(output, batch)
            last = dist.get_rank() == dist.get_world_size() - 1
            return (total * torch.nan if last and number == BAD else total), weight

        number = len(taken) + 1
        taken.append(train_step(model, parts, planted, optimizer, *args, **more))
        if number == BAD:
            guards[0].loss = planted  # for the repetition
        return taken[-1]

    guards: list[Guards] = []
    made = Guards.__init__

    def noted(self: Guards, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        guards.append(self)

    train_step = pz.train_step
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(pz, "train_step", step))
        patches.enter_context(mock.patch.object(Guards, "__init__", noted))
        if immediately:
            patches.enter_context(at_once())
        try:
            train.train(job)
            message = ""
        except PlanError as error:
            [found] = error.diagnostics
            message = f"{found.code}: {found.message}"
    return {"message": message, "launched": len(taken), "digests": [*digests, digest(*there)]}


@pytest.mark.parametrize("preset", chosen(("fsdp2", "tp2", "pp2"), ("fsdp2", "pp2")))
def test_a_step_that_is_not_finite_ends_the_run_as_if_it_was_read_at_once(
    preset: str, tmp_path: Path
) -> None:
    ways: list[list[dict[str, Any]]] = []
    for immediately in (True, False):
        folder = tmp_path / str(immediately)
        folder.mkdir()
        words = (f"parallel={preset}", "train.steps=8", "train.checkpoint_every=8")
        ways.append(run(folder, lambda job, now=immediately: spoilt(job, now), *words))
        assert [m["step"] for m in metrics(folder)] == list(range(1, BAD))
        assert not list(folder.glob("checkpoints/step_*"))
    now, late = ways
    for before, after in zip(now, late, strict=True):
        assert (before["launched"], after["launched"]) == (BAD, BAD + 1)
        assert after["message"] == before["message"] == now[0]["message"]
        assert after["message"].startswith(
            f"nonfinite: step {BAD}: the loss is NaN and the gradient norm NaN"
        )
        assert "it begins in the loss function" in after["message"] and "gradients of" in after["message"]
        # Nothing of the step, nor of the one behind it.
        assert before["digests"][BAD - 1] == before["digests"][-1] == after["digests"][-1]
        assert before["digests"][BAD - 2] != before["digests"][BAD - 1]


def rows(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics(folder)]


def test_the_metrics_are_those_of_steps_that_are_read_at_once_and_of_an_optimizer_that_is_not_fused(
    tmp_path: Path,
) -> None:
    words = ("parallel=fsdp2", "train.steps=7", "train.eval_every=3")
    found, results = {}, {}
    for name, more in {"late": (), "now": (), "plain": ("optim.fused=false",)}.items():
        (tmp_path / name).mkdir()
        with at_once() if name == "now" else ExitStack():
            results[name] = run_here(tmp_path / name, *words, *more)
        found[name] = rows(tmp_path / name)
        assert all(row["tokens_per_second"] > 0 for row in metrics(tmp_path / name))
    assert found["late"] == found["now"]
    assert [row["step"] for row in found["late"] if "validation_loss" in row] == [3, 6, 7]
    assert [row.keys() for row in found["late"]] == [row.keys() for row in found["plain"]]
    for late, plain in zip(found["late"], found["plain"], strict=True):
        assert late == pytest.approx(plain, rel=1e-4)
    assert results["late"].losses == tuple(row["loss"] for row in found["late"])


def slow(job: Job) -> None:
    """A run whose step 4 takes longest."""
    launched = 0

    def step(*args: Any, **more: Any) -> Step:
        nonlocal launched
        launched += 1
        time.sleep(1.0 * (launched == BAD))
        return train_step(*args, **more)

    train_step = pz.train_step
    with mock.patch.object(pz, "train_step", step):
        train.train(job)


def test_the_time_of_a_step_is_its_own(tmp_path: Path) -> None:
    began = time.monotonic()
    [_] = run(tmp_path, slow, "parallel=single", "train.steps=6")
    passed = time.monotonic() - began
    seconds = [8 * 64 / row["tokens_per_second"] for row in metrics(tmp_path)]
    assert seconds[BAD - 1] >= 1.0 and seconds[BAD - 1] == max(seconds) and sum(seconds) <= passed


def asked(job: Job) -> tuple[int, int]:
    """A run of which rank 1 alone is asked to stop. The signal, and how many steps were launched."""
    launched = 0

    def step(*args: Any, **more: Any) -> Step:
        nonlocal launched
        launched += 1
        if launched == BAD - 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)  # the next step's words tell it
        return train_step(*args, **more)

    train_step = pz.train_step
    with mock.patch.object(pz, "train_step", step):
        return train.train(job).stopped, launched


def test_a_signal_of_one_rank_stops_all_of_them_behind_the_same_step(tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    words = ("parallel=fsdp2", "train.steps=8", "train.checkpoint_every=8")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_here(whole, *words)
    assert run(stopped, asked, *words) == [(signal.SIGUSR1, BAD + 1)] * 2
    assert [path.name for path in stopped.glob("checkpoints/step_*")] == [f"step_{BAD + 1}"]
    assert rows(stopped) == rows(whole)[: BAD + 1]
    run_here(stopped, *words)
    assert rows(stopped) == rows(whole)


def test_steps_that_are_skipped_on_demand_are_left_out_alone(tmp_path: Path) -> None:
    """Each is read at once: the next one is applied, and its batch is not lost."""
    for found in run(
        tmp_path, lambda job: spoilt(job, False), "parallel=fsdp2", "train.steps=6", "train.on_nonfinite=skip"
    ):
        digests = found["digests"]
        assert found["message"] == "" and found["launched"] == 6
        assert digests[BAD - 1] == digests[BAD] and len(set(digests)) == 6
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
