"""Ranks that make no progress: noticed, told apart from those that wait for them, and shown with their stacks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from parallelizer.runtime.launch import lookout
from parallelizer.runtime.launch import watch as watch_ranks
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.heartbeat import Beat, beat
from parallelizer.runtime.launch.launcher import start
from parallelizer.runtime.launch.lookout import Lookout, describe, ranks_text
from parallelizer.runtime.launch.stacks import Frame, Stack
from tests.runtime.launch.test_launcher import nothing_left

__all__ = ["nothing_left"]


def at(count: int, when: float = 0.0) -> Beat:
    return Beat(count, count, when, "step")


def looks(stuck_after: float, seen: list[dict[int, Beat | None]], every: float = 1.0) -> list[float | None]:
    slow = Lookout(stuck_after)
    return [slow.look(beats, 100 + every * number) for number, beats in enumerate(seen)]


def test_it_speaks_once_when_the_slowest_rank_has_not_moved_for_too_long() -> None:
    told = looks(3, [{0: at(9, 5 + k), 1: at(8, 1)} for k in range(8)])
    assert told == [None, None, None, 3, None, None, None, None]


def test_progress_begins_the_count_anew() -> None:
    assert looks(3, [{0: at(k // 2, k // 2)} for k in range(20)]) == [None] * 20


def test_a_rank_that_was_slow_may_be_as_slow_again() -> None:
    stalls = [{0: at(1, 1.0)}] * 6 + [{0: at(2, 2.0)}] * 9 + [{0: at(3, 3.0)}] * 30
    told = looks(3, stalls)
    assert [k for k, one in enumerate(told) if one] == [3, 15 + 10]


def test_a_rank_without_a_beat_is_behind_those_that_have_one() -> None:
    assert looks(2, [{0: None, 1: None}] * 5) == [None] * 5
    assert looks(2, [{0: at(k, k), 1: None} for k in range(1, 5)]) == [None, None, 2, None]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    slow = Lookout(20)
    assert slow.look({0: at(1)}, 0.0) is None
    assert slow.look({0: at(1)}, 1000.0) is None


def test_never_is_never() -> None:
    assert looks(0, [{0: at(1)}] * 3, every=1e9) == [None] * 3


# What is said

HERE = Stack((Frame("/a/data.py", 7, "read"), Frame("/a/train.py", 3, "train")))
WAITS = Stack((Frame("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce"), *HERE.frames))


def test_the_rank_that_is_not_in_a_collective_is_behind() -> None:
    beats = {rank: at(17) for rank in range(4)}
    assert describe(300.4, 4, beats, [{0: WAITS, 1: WAITS, 2: HERE, 3: WAITS}] * 2).splitlines() == [
        "no progress for 300 s: rank 2 of 4 is behind, and ranks 0-1, 3 wait in a collective",
        "  rank 2: step 17, most recent call first",
        "    read (/a/data.py:7)",
        "    train (/a/train.py:3)",
    ]


def test_of_two_at_work_the_one_in_an_earlier_step_is_behind() -> None:
    told = describe(1, 3, {0: at(17), 1: at(16), 2: at(17)}, [{0: WAITS, 1: HERE, 2: HERE}])
    assert told.startswith("no progress for 1 s: rank 1 of 3 is behind, and rank 0 waits")


def test_ranks_that_all_wait_wait_for_different_things() -> None:
    other = Stack((Frame("/x/torch/distributed/distributed_c10d.py", 5, "broadcast"),))
    lines = describe(1, 3, {rank: at(1) for rank in range(3)}, [{0: WAITS, 1: other, 2: WAITS}]).splitlines()
    assert lines[0].endswith("all of 3 ranks wait in collectives, and not in the same one")
    assert [line for line in lines if "rank" in line][1:] == [
        "  ranks 0, 2: step 1, most recent call first",
        "  rank 1: step 1, most recent call first",
    ]


def test_ranks_that_are_all_at_work_are_not_blamed() -> None:
    for looks in ([{0: HERE, 1: HERE}], [{0: WAITS, 1: HERE}, {0: HERE, 1: WAITS}]):
        told = describe(1, 2, {0: at(1), 1: at(1)}, looks)
        assert told.startswith("no progress for 1 s: all of 2 ranks are computing, so this step is slow\n")


def test_a_rank_that_was_once_in_a_collective_is_not_blamed() -> None:
    looks = [{0: WAITS, 1: WAITS, 2: HERE}, {0: WAITS, 1: HERE, 2: HERE}]
    told = describe(1, 3, {rank: at(1) for rank in range(3)}, looks)
    assert told.startswith("no progress for 1 s: rank 2 of 3 is behind, and rank 0 waits in a collective\n")


def test_a_rank_that_gives_no_stack_is_said_to(tmp_path: Path) -> None:
    lines = describe(1, 2, {0: None, 1: at(1)}, [{1: WAITS}] * 2).splitlines()
    assert (
        lines[1]
        == "  rank 0: before its first step, gives no stack: it is stopped, or blocked in a system call"
    )


def test_a_line_that_waits_waits(tmp_path: Path) -> None:
    source = tmp_path / "ring.py"
    source.write_text("for work in works:\n    work.wait()\n    compute()\n")
    assert Stack((Frame(str(source), 2, "ring"),)).waits
    assert not Stack((Frame(str(source), 3, "ring"),)).waits


@pytest.mark.parametrize(
    ("ranks", "text"), [({3}, "rank 3"), ({7, 3}, "ranks 3, 7"), ({0, 1, 2, 5}, "ranks 0-2, 5")]
)
def test_ranks_in_words(ranks: set[int], text: str) -> None:
    assert ranks_text(ranks) == text


# Of ranks that run


def hold_up(how: str) -> None:
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(20)


def add_up(mesh: DeviceMesh) -> None:
    """By DTensor on one rank and by the collective itself on others: they wait at different places."""
    if dist.get_rank() == 2:
        part = DTensor.from_local(torch.ones(1, requires_grad=True), mesh, [Partial()])
        part.redistribute(placements=[Replicate()]).to_local().sum().item()
    else:
        dist.all_reduce(torch.ones(1))


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["asleep", "stopped"])
def test_a_rank_that_holds_the_others_up_is_named_with_its_stack_and_the_timeout_ends_it(
    how: str, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "INTERVAL", 0.1)
    monkeypatch.setattr(watch_ranks, "GRACE", 1.0)

    def worker() -> None:
        mesh = init_device_mesh("cpu", (3,))
        for step in range(5):
            beat(step)
            if step == 2 and dist.get_rank() == 1:
                hold_up(how)
            add_up(mesh)

    with pytest.raises(LaunchError, match=r"rank [02] of 3 failed"):
        start(worker, ranks=3, device="cpu", stuck_after=0.5, collective_timeout=3, start_timeout=60)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith("rank 1 of 3 is behind, and ranks 0, 2 wait in a collective")
    if how == "asleep":
        assert lines[1] == "  rank 1: step 2, most recent call first"
        assert lines[2].startswith(f"    hold_up ({__file__}:")
    else:
        assert lines[1].startswith("  rank 1: step 2, gives no stack: it is stopped")
    assert sum(line.startswith("warning") for line in lines) == 1


@pytest.mark.ranks
def test_ranks_that_are_asked_where_they_stand_go_on(
    capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "INTERVAL", 0.1)

    def worker() -> float:
        total = torch.ones(1)
        for step in range(3):
            beat(step)
            time.sleep(0.8 if dist.get_rank() == step else 0)
            dist.all_reduce(total)
        return total.item()

    assert start(worker, ranks=3, device="cpu", stuck_after=0.4) == [27.0] * 3
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert said and "rank 0 of 3 is behind" in said[0]
