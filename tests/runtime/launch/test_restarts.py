"""Ranks that ended are started again, at once and as often as it helps; and killed at any moment, they come back."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelizer.runtime.launch import launcher as launch
from parallelizer.runtime.launch import restarts
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.heartbeat import beat
from parallelizer.runtime.launch.launcher import start
from parallelizer.runtime.launch.restarts import End, Restarts
from parallelizer.runtime.launch.stopping import stop_requests
from tests.runtime.launch.test_launcher import children, nothing_left

__all__ = ["nothing_left"]


def die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the reason")


# When it is given up


def end(rank: int | None = 1, step: int | None = 7, how: str = "rank 1 of 4 was killed") -> End:
    return End(rank, step, how)


def raised(rank: int, step: int, what: str) -> End:
    return End(rank, step, f"rank {rank} of 4 failed (exit code 1): {what}", raised=True)


ERROR = LaunchError("in full", "a help")


def given_up(ends: list[End], most: int = 100) -> LaunchError | None:
    """What a row of ends comes to, and that nothing before the last is given up."""
    counted = Restarts(most)
    for number, one in enumerate(ends, 1):
        try:
            counted.again(one, ERROR)
        except LaunchError as error:
            assert number == len(ends)
            return error
    return None


@pytest.mark.parametrize(
    "ends",
    [
        [end()] * 3,
        [end(step=None)] * 3,
        [end(rank=None, step=None)] * 3,
        [end(step=6), *[end()] * 3],
        [raised(rank, 7, "ValueError: the same") for rank in (0, 2, 1)],
    ],
)
def test_three_ends_in_a_row_at_the_same_place_are_the_last(ends: list[End]) -> None:
    assert given_up(ends) is not None


@pytest.mark.parametrize(
    "ends",
    [
        [end()] * 2,
        [end(), end(), end(step=8), end(), end()],
        [end(), end(), end(step=None), end(), end()],
        [end(), end(), end(rank=2), end(), end()],
        [end(rank=0), end(rank=1), end(rank=2)],
        [raised(0, 7, "ValueError: one"), raised(1, 7, "ValueError: one"), raised(2, 7, "ValueError: other")],
        [raised(0, 7, "ValueError: one"), raised(1, 8, "ValueError: one"), raised(2, 9, "ValueError: one")],
    ],
)
def test_progress_or_another_rank_begins_the_count_anew(ends: list[End]) -> None:
    assert given_up(ends) is None


def test_what_is_given_up_names_rank_step_and_the_ends() -> None:
    error = given_up([end(how=f"rank 1 of 4 ended so {k}") for k in range(3)])
    assert error is not None
    assert error.message.splitlines() == [
        "rank 1 ended 3 times in a row in step 7: starting again does not help",
        "  1: rank 1 of 4 ended so 0",
        "  2: rank 1 of 4 ended so 1",
        "  3: rank 1 of 4 ended so 2",
        "",
        "in full",
    ]
    assert error.help == "a help"


def test_it_is_started_again_as_often_as_allowed(capsys: pytest.CaptureFixture) -> None:
    assert given_up([end(step=k) for k in range(3)], most=2) is ERROR
    assert capsys.readouterr().err.splitlines() == [
        "warning: rank 1 of 4 was killed, in step 0: starting again, 1 of 2",
        "warning: rank 1 of 4 was killed, in step 1: starting again, 2 of 2",
    ]


def test_a_negative_number_of_restarts_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Restarts(-1)


# Of ranks that run


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_ends_three_times_in_the_same_step_stops_the_run(how: str, tmp_path: Path) -> None:
    def worker() -> None:
        (tmp_path / os.environ["TORCHELASTIC_RESTART_COUNT"]).touch()
        for step in range(5):
            beat(step)
            if step == 3 and dist.get_rank() == 1:
                die(how)
            dist.barrier()

    with pytest.raises(LaunchError, match=r"^rank 1 ended 3 times in a row in step 3") as caught:
        start(worker, ranks=2, device="cpu", max_restarts=9)
    ends = caught.value.message.splitlines()[1:4]
    what = "was killed by SIGKILL (exit code -9)" if how == "kill" else "failed (exit code 1): ValueError"
    assert all(what in line for line in ends)
    assert ("in die" in caught.value.message) == (how == "raise")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.ranks
def test_a_run_that_comes_further_each_time_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    done = tmp_path / "done"

    def worker() -> int:
        for step in range(int(done.read_text()), 5):
            beat(step)
            dist.barrier()
            if dist.get_rank() == 0:
                done.write_text(str(step + 1))
                die("kill")
        return 5

    done.write_text("0")
    assert start(worker, ranks=2, device="cpu", max_restarts=5) == [5, 5]
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(", ")[2] for line in lines] == [
        f"in step {k}: starting again, {k + 1} of 5" for k in range(5)
    ]


@pytest.mark.ranks
def test_an_agent_that_never_returns_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    real, over = launch.elastic_launch, threading.Event()

    def lost(*args: Any) -> Callable[..., Any]:
        def run(job: object) -> None:
            real(*args)(job)
            over.wait(30)

        return run

    monkeypatch.setattr(launch, "elastic_launch", lost)
    monkeypatch.setattr(launch, "_LOST", 0.5)
    begin = time.monotonic()
    try:
        assert start(dist.get_rank, ranks=2, device="cpu") == [0, 1]
    finally:
        over.set()
    assert time.monotonic() - begin < 10


@pytest.mark.ranks
def test_groups_made_later_have_the_same_timeout() -> None:
    def worker() -> float:
        pair = dist.new_group([0, 1])
        begin = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.all_reduce(torch.ones(1), group=pair)
        else:
            time.sleep(2)
        return time.monotonic() - begin

    assert start(worker, ranks=2, device="cpu", collective_timeout=1)[0] < 2


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills", "graceful"), [(4, 40, 0), (16, 15, 60)])
def test_kills_at_random_moments_are_recovered_from(
    ranks: int,
    kills: int,
    graceful: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    """Ranks add up in two threads, each with its group, while a third kills them: in the start as well."""
    monkeypatch.setattr(restarts, "IN_A_ROW", 10**6)
    enough, living = tmp_path / "enough", tmp_path / "living"
    killed: list[float] = []

    def add_up(group: dist.ProcessGroup | None, leads: bool) -> None:
        for step in range(10**6):
            if leads:
                beat(step)
            total = torch.tensor([1.0, float(enough.exists())])
            dist.all_reduce(total, group=group)
            if leads and dist.get_rank() == 0:
                with open(living, "a") as file:
                    file.write(f"{time.monotonic()}\n")
            if total[1] > 0:
                return
            time.sleep(0.01)

    def worker() -> str:
        thread = threading.Thread(target=add_up, args=(dist.new_group(), False), daemon=True)
        with stop_requests() if graceful else nullcontext():
            thread.start()
            add_up(None, True)
            thread.join()
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    strangers = children(os.getpid())

    def kill() -> None:
        dice = random.Random(0)
        while len(killed) < kills:
            time.sleep(dice.uniform(0, 2.5 if ranks == 4 else 10))
            if victims := sorted(children(os.getpid()) - strangers):
                os.kill(dice.choice(victims), signal.SIGKILL)
                killed.append(time.monotonic())
        time.sleep(2)
        enough.touch()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    results = start(worker, ranks=ranks, device="cpu", max_restarts=10**6, graceful=graceful)
    killer.join()
    assert len(set(results)) == 1
    signs = [float(line) for line in living.read_text().split()]
    # A kill whose run comes back before the next one: how long that took.
    recovered = []
    for this, following in zip(killed, [*killed[1:], float("inf")], strict=True):
        # What was under way at the kill may still end a moment after it.
        back = next((sign for sign in signs if sign > this + 0.2), None)
        if back is not None and back < following:
            recovered.append(back - this)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    with capfd.disabled():
        print(
            f"\n{ranks} ranks, {len(killed)} kills, {results[0]} restarts; {len(recovered)} times back before the "
            f"next kill: median {statistics.median(recovered):.2f} s, worst {max(recovered):.2f} s"
        )
    # Of two that are killed together one is told. And nobody is blamed who was not killed.
    assert len(said) == int(results[0]) <= len(killed)
    assert all("was killed by SIGKILL" in line for line in said)
    assert max(recovered) < 60
    assert len(recovered) > kills / 4
