"""Signals that ask to stop: noted by ranks, passed on by their parent, and obeyed at once when they are repeated."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelizer.runtime.launch import stopping
from parallelizer.runtime.launch import watch as watch_ranks
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.launcher import start
from parallelizer.runtime.launch.stopping import stop_requests
from tests.runtime.launch.test_launcher import children, nothing_left

__all__ = ["nothing_left"]

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests are told apart soon, and handlers are put back, for stop_requests may leave signals ignored."""
    monkeypatch.setattr(stopping, "TOGETHER", 0.4)
    monkeypatch.setattr(stopping, "_LOOK", 0.05)
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# In a process of its own


def exit_code(function: Callable[[], object], signals: tuple[tuple[int, float], ...] = ()) -> int | None:
    """How a process ends that runs a function, and gets signals, each after so many seconds."""
    ready = FORK.Event()

    def run() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with stop_requests() as asked:
            ready.set()
            while not asked.signal:
                time.sleep(0.01)
            function()
        sys.exit(asked.signal)

    process = FORK.Process(target=run, daemon=True)
    process.start()
    assert process.pid is not None
    assert ready.wait(10)
    for number, after in signals:
        time.sleep(after)
        os.kill(process.pid, number)
    process.join(5)
    assert process.exitcode is not None
    return process.exitcode


def hang_in_c() -> None:
    """Wait in C for what never comes, as a collective does; signals do not end the wait."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_first_signal_is_noted_and_ends_nothing(number: signal.Signals) -> None:
    assert exit_code(lambda: None, ((number, 0),)) == number


def test_signals_close_together_are_one_request() -> None:
    signals = ((signal.SIGUSR1, 0), (signal.SIGUSR1, 0.1), (signal.SIGTERM, 0.1))
    assert exit_code(lambda: time.sleep(0.7), signals) == signal.SIGUSR1


@pytest.mark.parametrize("stand", [hang_in_c, lambda: time.sleep(10)])
def test_a_second_request_ends_the_process_at_once_wherever_it_stands(stand: Callable[[], None]) -> None:
    begin = time.monotonic()
    assert exit_code(stand, ((signal.SIGUSR1, 0), (signal.SIGTERM, 0.8))) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 4


def test_signals_that_are_seen_late_because_the_interpreter_was_busy_are_one_request() -> None:
    def keep_the_interpreter() -> None:
        sum(range(40_000_000))  # keeps its lock for half a second and more
        time.sleep(0.3)

    assert exit_code(keep_the_interpreter, ((signal.SIGUSR1, 0), (signal.SIGUSR1, 0.1))) == signal.SIGUSR1


def test_a_forked_child_ends_by_the_signal_and_does_not_tell_its_parent() -> None:
    with stop_requests() as asked:
        child = FORK.Process(target=time.sleep, args=(20,), daemon=True)
        child.start()
        child.terminate()
        child.join(5)
        assert child.exitcode == -signal.SIGTERM
        time.sleep(0.1)
        assert asked.signal == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.signal == signal.SIGTERM


def test_handlers_and_wakeup_are_as_before_afterwards() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(n) for n in numbers]
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError), stop_requests():
        raise ZeroDivisionError
    assert [signal.getsignal(n) for n in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads


def test_after_a_request_its_copies_end_nothing() -> None:
    with stop_requests():
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with stop_requests() as asked:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            assert not asked
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_nothing_is_asked() -> None:
    seen: list[int] = []

    def other() -> None:
        with stop_requests() as asked:
            seen.append(asked.signal)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [0]


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order; submitit's handler is one of it."""
    order: list[str] = []
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.delenv("SUBMITIT_PREEMPT_SIGNAL", raising=False)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: order.append(f"queued again by {number}"))
    yield order  # type: ignore[misc]
    signal.signal(signal.SIGUSR2, before)


def test_submitits_handler_is_called_when_all_is_saved(submitit: list[str]) -> None:
    with stop_requests() as asked:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert asked.signal == signal.SIGUSR2
        submitit.append("saved")
    assert submitit == ["saved", f"queued again by {signal.SIGUSR2}"]


def test_submitits_handler_is_not_called_when_saving_has_failed(submitit: list[str]) -> None:
    with pytest.raises(OSError), stop_requests():
        os.kill(os.getpid(), signal.SIGUSR2)
        raise OSError
    assert submitit == []


def test_submitits_signal_may_be_another(submitit: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "HUP")
    assert stopping.stop_signals() == (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    assert stopping.stop_signals() == (signal.SIGTERM, signal.SIGUSR1)


# Of ranks


class Ready:
    """A folder into which ranks put a file when they are ready; then something is done in a thread of the parent."""

    def __init__(self, folder: Path, ranks: int, then: Callable[[set[int]], None]) -> None:
        self.folder, self.ranks, self.then = folder, ranks, then
        self.strangers = children(os.getpid())
        threading.Thread(target=self.wait, daemon=True).start()

    def tell(self) -> None:
        (self.folder / str(dist.get_rank())).touch()

    def wait(self) -> None:
        until = time.monotonic() + 30
        while len(list(self.folder.iterdir())) < self.ranks and time.monotonic() < until:
            time.sleep(0.02)
        self.then(children(os.getpid()) - self.strangers)


def to_parent(number: int) -> Callable[[set[int]], None]:
    return lambda ranks: os.kill(os.getpid(), number)


def in_lockstep(ready: Ready, seconds: float = 20) -> tuple[int, int]:
    """All-reduce until all have agreed that one was asked to stop. Returns the signal and the steps done."""
    with stop_requests() as asked:
        ready.tell()
        for step in range(int(seconds * 100)):
            total = torch.tensor([asked.signal])
            dist.all_reduce(total, op=dist.ReduceOp.MAX)
            if total.item():
                return int(total.item()), step
            time.sleep(0.01)
    raise AssertionError("nobody was asked")


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_stop_in_time_return_their_results(number: signal.Signals, tmp_path: Path) -> None:
    ready = Ready(tmp_path, 2, to_parent(number))
    results = start(lambda: in_lockstep(ready), ranks=2, device="cpu", graceful=20, max_restarts=3)
    assert [result[0] for result in results] == [number] * 2
    assert results[0][1] == results[1][1]


@pytest.mark.ranks
def test_a_signal_to_the_whole_group_is_one_request(tmp_path: Path) -> None:
    def to_all(ranks: set[int]) -> None:
        assert len(ranks) == 2
        for pid in (*ranks, os.getpid()):
            os.kill(pid, signal.SIGTERM)

    def worker() -> tuple[int, int]:
        stopped = in_lockstep(ready)
        time.sleep(0.3)  # what the parent passes on has come by then
        return stopped

    ready = Ready(tmp_path, 2, to_all)
    assert [n for n, _ in start(worker, ranks=2, device="cpu", graceful=20)] == [signal.SIGTERM] * 2


@pytest.mark.ranks
def test_ranks_that_do_not_stop_in_time_are_ended_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    def worker() -> None:
        with stop_requests():
            ready.tell()
            time.sleep(0 if dist.get_rank() == 0 else 30)

    ready = Ready(tmp_path, 3, to_parent(signal.SIGTERM))
    begin = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        start(worker, ranks=3, device="cpu", graceful=1, max_restarts=3)
    assert caught.value.code == 143
    assert time.monotonic() - begin < 10
    said = "warning: ranks 1-2 of 3 had not stopped 1 s after SIGTERM, and are ended\n"
    assert capfd.readouterr().err == said


@pytest.mark.ranks
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_to_the_parent_ends_all_at_once(second: signal.Signals, tmp_path: Path) -> None:
    def twice(ranks: set[int]) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(1)
        os.kill(os.getpid(), second)

    def worker() -> None:
        with stop_requests():
            ready.tell()
            time.sleep(30)

    ready = Ready(tmp_path, 2, twice)
    begin = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        start(worker, ranks=2, device="cpu", graceful=60)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert time.monotonic() - begin < 8


@pytest.mark.ranks
def test_an_exception_after_the_request_is_told_and_nothing_starts_again(tmp_path: Path) -> None:
    def worker() -> None:
        in_lockstep(ready)
        if dist.get_rank() == 1:
            raise OSError("no space left")
        dist.barrier()

    ready = Ready(tmp_path, 2, to_parent(signal.SIGUSR1))
    with pytest.raises(LaunchError, match=r"^rank 1 of 2 failed \(exit code 1\): OSError: no space left"):
        start(worker, ranks=2, device="cpu", graceful=20, max_restarts=3)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_that_listen_to_no_request_end_by_it(number: signal.Signals, tmp_path: Path) -> None:
    def worker() -> None:
        ready.tell()
        dist.barrier() if dist.get_rank() else time.sleep(30)

    ready = Ready(tmp_path, 2, to_parent(number))
    with pytest.raises(SystemExit) as caught:
        start(worker, ranks=2, device="cpu", graceful=20, max_restarts=3)
    assert caught.value.code == 128 + number


@pytest.mark.ranks
def test_a_request_during_the_start_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = dist.init_process_group

    def slow(*args: object, **kwargs: object) -> None:
        (tmp_path / os.environ["RANK"]).touch()
        time.sleep(3)
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "init_process_group", slow)
    Ready(tmp_path, 2, to_parent(signal.SIGUSR1))
    with pytest.raises(SystemExit) as caught:
        start(dist.get_rank, ranks=2, device="cpu", graceful=20, max_restarts=3)
    assert caught.value.code == 128 + signal.SIGUSR1


@pytest.mark.ranks
def test_survivors_that_take_the_agents_sigterm_for_a_request_are_ended_soon(tmp_path: Path) -> None:
    def worker() -> str:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        with stop_requests():
            if attempt == "0":
                if dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(30)
            return attempt

    begin = time.monotonic()
    assert start(worker, ranks=3, device="cpu", graceful=60, max_restarts=1) == ["1"] * 3
    assert time.monotonic() - begin < watch_ranks.SOON + 6


@pytest.mark.ranks
def test_submitits_handler_is_called_by_the_parent_when_its_ranks_have_stopped(
    submitit: list[str], tmp_path: Path
) -> None:
    ready = Ready(tmp_path, 2, to_parent(signal.SIGUSR2))

    def worker() -> int:
        return in_lockstep(ready)[0]

    assert start(worker, ranks=2, device="cpu", graceful=20) == [signal.SIGUSR2] * 2
    assert submitit == [f"queued again by {signal.SIGUSR2}"]
