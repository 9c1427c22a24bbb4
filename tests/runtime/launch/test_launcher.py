"""Ranks that this process starts: they run, and whatever happens, none is left and the reason is told."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.runtime.launch import launcher as launch
from parallelizer.runtime.launch import watch as watch_ranks
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.launcher import start
from tests.chosen import marks_at
from tests.ranks import run_ranks


def children(of: int) -> set[int]:
    """Process ids whose parent is `of`; neither zombies nor Python's resource tracker, which stays."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(parent) == of and state != "Z" and not tracker:
            found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: set[int], within: float) -> bool:
    until = time.monotonic() + within
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test: no process, no file, handlers, environment and loggers as before."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    processes = children(os.getpid())
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    environment = dict(os.environ)
    elastic = logging.getLogger("torch.distributed.elastic")
    logger = (elastic.propagate, list(elastic.handlers))
    yield
    assert gone(children(os.getpid()) - processes, within=2)
    assert list(folder.iterdir()) == []
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    ours = ("TORCH", "RANK", "WORLD", "LOCAL", "MASTER", "GLOO")
    assert {k: v for k, v in os.environ.items() if k.startswith(ours)} == {
        k: v for k, v in environment.items() if k.startswith(ours)
    }
    assert (elastic.propagate, list(elastic.handlers)) == logger


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_ranks, "GRACE", 1.0)


# Ranks that do their work


@pytest.mark.ranks
def test_results_come_in_order_of_rank_and_the_ranks_are_joined() -> None:
    big = torch.arange(6.0).reshape(2, 3)

    def worker(text: str) -> tuple:
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        environment = [os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        return (
            dist.get_rank(),
            total.item(),
            text,
            big * dist.get_rank(),
            torch.get_num_threads(),
            environment,
        )

    results = run_ranks(worker, 3, "text")
    assert [r[0] for r in results] == [0, 1, 2]
    assert [r[1] for r in results] == [3.0] * 3
    assert [r[2] for r in results] == ["text"] * 3
    assert all(torch.equal(r[3], big * k) for k, r in enumerate(results))
    assert [r[4] for r in results] == [1] * 3
    assert [r[5] for r in results] == [[str(k), str(k), "3"] for k in range(3)]


@pytest.mark.ranks
def test_arguments_and_worker_are_inherited_not_pickled() -> None:
    lock = threading.Lock()  # does not pickle
    assert run_ranks(lambda given: given is lock, 2, lock) == [True, True]


@pytest.mark.ranks
def test_a_rank_that_finishes_early_does_not_disturb_the_others() -> None:
    def worker() -> int:
        others = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            return 0
        time.sleep(0.3)
        late = dist.new_group([1, 2], use_local_synchronization=True)  # needs the store that rank 0 has left
        total = torch.ones(1)
        dist.all_reduce(total, group=others)
        dist.all_reduce(total, group=late)
        return int(total.item())

    assert run_ranks(worker, 3) == [0, 4, 4]


@pytest.mark.ranks
def test_a_large_result_arrives() -> None:
    assert [len(r) for r in run_ranks(lambda: b"x" * 3_000_000, 2)] == [3_000_000] * 2


@pytest.mark.ranks
def test_a_worker_may_end_by_exiting_with_zero() -> None:
    def worker() -> int:
        if dist.get_rank() == 1:
            sys.exit(0)
        return 5

    assert run_ranks(worker, 2) == [5, None]


@pytest.mark.ranks
def test_rank_0_writes_to_the_console_and_the_others_to_their_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    def worker() -> None:
        print(f"stdout of {dist.get_rank()}")
        print(f"stderr of {dist.get_rank()}", file=sys.stderr)
        os.system(f"echo shell of {dist.get_rank()}")

    start(worker, ranks=2, device="cpu", log_dir=tmp_path / "logs")
    console = capfd.readouterr()
    assert console.out.splitlines() == ["stdout of 0", "shell of 0"]
    assert console.err.splitlines() == ["stderr of 0"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank1.log"]
    assert (tmp_path / "logs" / "rank1.log").read_text().splitlines() == [
        "stdout of 1",
        "stderr of 1",
        "shell of 1",
    ]

    start(worker, ranks=2, device="cpu")
    assert "of 1" not in str(capfd.readouterr())


@pytest.mark.ranks
def test_ranks_can_be_started_from_another_thread() -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.extend(run_ranks(dist.get_rank, 2)))
    thread.start()
    thread.join()
    assert results == [0, 1]


@pytest.mark.ranks
def test_processes_of_others_are_left_alone() -> None:
    context = multiprocessing.get_context("fork")
    before, during = (context.Process(target=time.sleep, args=(100,)) for _ in range(2))
    before.start()
    timer = threading.Timer(0.5, during.start)
    timer.start()
    run_ranks(time.sleep, 2, 1)
    timer.join()
    assert before.is_alive() and during.is_alive()
    for process in (before, during):
        process.kill()
        process.join()


# Ranks that fail


@pytest.mark.ranks
def test_a_failing_rank_is_named_with_its_own_traceback(capfd: pytest.CaptureFixture) -> None:
    def deep() -> None:
        raise ValueError("the reason\nin two lines")

    def worker() -> None:
        if dist.get_rank() == 2:
            deep()
        dist.barrier()

    with pytest.raises(LaunchError) as caught:
        run_ranks(worker, 4)
    lines = caught.value.message.splitlines()
    assert lines[0] == "rank 2 of 4 failed (exit code 1): ValueError: the reason"
    assert lines[2] == "Traceback (most recent call last):"
    assert "in worker" in lines[3]
    assert any("in deep" in line for line in lines)
    assert "ValueError: the reason\nin two lines\n" in caught.value.message
    assert caught.value.message.count("Traceback") == 1
    console = capfd.readouterr()
    assert (console.out, console.err) == ("", "")


@pytest.mark.ranks
def test_the_help_points_at_the_log_of_the_failing_rank(tmp_path: Path) -> None:
    def worker() -> None:
        print("last words")
        if dist.get_rank() == 1:
            raise RuntimeError
        dist.barrier()

    with pytest.raises(LaunchError) as caught:
        start(worker, ranks=2, device="cpu", log_dir=tmp_path)
    assert caught.value.message.startswith("rank 1 of 2 failed (exit code 1): RuntimeError\n")
    assert caught.value.help is not None
    assert caught.value.help.splitlines()[0] == f"its output: {tmp_path}/rank1.log"
    assert (tmp_path / "rank1.log").read_text().startswith("last words\nTraceback (most recent")
    # The other may have been ended before it noticed.
    if "then rank 0" in caught.value.message:
        # Which of the two gloo says depends on what was still on its way.
        said = r"then rank 0 lost another rank: Connection (closed|reset) by peer"
        assert re.search(said, caught.value.message)
        assert f"the others' tracebacks: {tmp_path}/rank*.log" in caught.value.help


@pytest.mark.ranks
def test_the_same_failure_on_every_rank_is_told_once() -> None:
    def worker() -> None:
        raise ValueError("everywhere")

    with pytest.raises(LaunchError) as caught:
        run_ranks(worker, 3)
    assert caught.value.message.count("Traceback") == 1


@pytest.mark.ranks
def test_an_exit_code_is_told() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 of 1 failed \(exit code 7\): SystemExit: 7"):
        run_ranks(lambda: sys.exit(7), 1)


@pytest.mark.ranks
def test_a_result_that_does_not_pickle_is_a_failure_of_its_rank() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 of 1 failed.*pickle"):
        run_ranks(lambda: threading.Lock(), 1)


@pytest.mark.ranks
def test_a_plan_error_crosses_with_its_diagnostics() -> None:
    finding = Diagnostic("some-code", "what is wrong", Span("plan.yaml", 3, 4, 9), "what to do")

    def worker() -> None:
        if dist.get_rank() == 1:
            raise PlanError([finding])
        dist.barrier()

    with pytest.raises(PlanError) as caught:
        run_ranks(worker, 2)
    assert caught.value.diagnostics == (finding,)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_the_signal(number: signal.Signals) -> None:
    def worker() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        dist.barrier()

    begin = time.monotonic()
    with pytest.raises(LaunchError, match=rf"^rank 1 of 3 was killed by {number.name}") as caught:
        run_ranks(worker, 3)
    assert time.monotonic() - begin < 10
    assert ("memory" in (caught.value.help or "")) == (number == signal.SIGKILL)


@pytest.mark.ranks
def test_others_that_do_not_notice_a_killed_rank_are_ended(short_grace: None) -> None:
    def worker() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"^rank 1 of 3 was killed by SIGKILL"):
        run_ranks(worker, 3)
    assert time.monotonic() - begin < 10


@pytest.mark.ranks
def test_a_rank_that_vanishes_without_a_word_is_noticed(short_grace: None) -> None:
    def worker() -> None:
        if dist.get_rank() == 1:
            os._exit(0)
        time.sleep(100)

    with pytest.raises(LaunchError, match=r"^rank 1 of 2 ended with exit code 0 before its work was done"):
        run_ranks(worker, 2)


@pytest.mark.ranks
def test_a_rank_that_hangs_at_the_start_is_named_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.init_process_group

    def hang(*args: object, **kwargs: object) -> None:
        if os.environ["RANK"] in ("1", "3"):
            time.sleep(100)
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "init_process_group", hang)
    begin = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run_ranks(dist.get_rank, 4, timeout=1.5)
    assert time.monotonic() - begin < 10
    assert caught.value.message == "ranks 1, 3 of 4 had not reached their first all-reduce after 1.5 s"
    assert caught.value.help is not None
    assert f"rank 3 stood in hang ({__file__}:" in caught.value.help
    assert "ranks 0, 2 waited for them" in caught.value.help


@pytest.mark.ranks
def test_a_rank_that_is_stopped_at_the_start_is_ended(
    monkeypatch: pytest.MonkeyPatch, short_grace: None
) -> None:
    real = dist.init_process_group

    def stop(*args: object, **kwargs: object) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "init_process_group", stop)
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"^rank 1 of 2 had not reached its first all-reduce after 1 s"):
        run_ranks(dist.get_rank, 2, timeout=1)
    assert time.monotonic() - begin < 10


@pytest.mark.ranks
def test_a_failing_start_is_repeated_as_often_as_allowed(tmp_path: Path) -> None:
    def worker() -> str:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        if dist.get_rank() == 1 and attempt != "2":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return attempt

    assert start(worker, ranks=2, device="cpu", max_restarts=2, log_dir=tmp_path) == ["2", "2"]
    assert (tmp_path / "rank1.log").read_text() == "attempt 0\nattempt 1\nattempt 2\n"
    with pytest.raises(LaunchError, match="was killed by SIGKILL"):
        start(worker, ranks=2, device="cpu", max_restarts=1)


@pytest.mark.ranks
def test_a_plan_error_is_not_tried_again(tmp_path: Path) -> None:
    def worker() -> None:
        (tmp_path / os.environ["TORCHELASTIC_RESTART_COUNT"]).touch()
        raise PlanError([Diagnostic("some-code", "what is wrong")])

    with pytest.raises(PlanError):
        start(worker, ranks=1, device="cpu", max_restarts=3)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.ranks
def test_a_fork_that_fails_leaves_none_of_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, forks = os.fork, iter(range(100))

    def fork() -> int:
        if next(forks) == 2:
            raise OSError("no more processes")
        return real()

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(LaunchError, match="could not be started: OSError: no more processes"):
        run_ranks(dist.get_rank, 4)


@pytest.mark.ranks
def test_a_collective_that_takes_too_long_fails() -> None:
    def worker() -> None:
        if dist.get_rank() == 0:
            time.sleep(100)
        dist.barrier()

    with pytest.raises(LaunchError, match=r"rank 1 of 2 failed .*[Tt]imed out"):
        start(worker, ranks=2, device="cpu", collective_timeout=1)


def spawned_worker(text: str) -> tuple[int, str]:
    if text == "fail" and dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()
    return dist.get_rank(), text


@pytest.mark.ranks
def test_spawned_ranks_as_on_cuda_behave_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.LaunchConfig
    monkeypatch.setattr(launch, "LaunchConfig", lambda **config: real(**{**config, "start_method": "spawn"}))
    assert run_ranks(spawned_worker, 2, "text") == [(0, "text"), (1, "text")]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_spawned_rank_that_fails_is_told_as_a_forked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.LaunchConfig
    monkeypatch.setattr(launch, "LaunchConfig", lambda **config: real(**{**config, "start_method": "spawn"}))
    with pytest.raises(LaunchError, match=r"rank 1 of 2 failed \(exit code 1\): ValueError: boom"):
        run_ranks(spawned_worker, 2, "fail")


def test_a_process_with_a_process_group_does_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="has a process group") as caught:
        run_ranks(dist.get_rank, 2)
    assert "destroy_process_group" in (caught.value.help or "")


def test_a_number_of_ranks_below_one_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"^0 ranks cannot be started"):
        run_ranks(dist.get_rank, 0)


# Signals to the parent

PARENT = """
    import os, sys, time
    import torch.distributed as dist
    from parallelizer.runtime.launch import watch as watch_ranks
    from parallelizer.runtime.launch.launcher import start

    if sys.argv[1] == "stubborn":
        watch_ranks.GRACE = 1.0

    def worker():
        print("ready", flush=True)
        if sys.argv[1] == "stubborn":
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.argv[1] == "collective" and dist.get_rank() == 0:
            time.sleep(100)
        dist.barrier() if sys.argv[1] == "collective" else time.sleep(100)

    try:
        start(worker, ranks=4, device="cpu")
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
    except SystemExit as end:
        print("SystemExit", end.code, flush=True)
"""


@pytest.fixture
def parent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen]:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    (tmp_path / "notes").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), request.param],
        env={**os.environ, "TMPDIR": str(tmp_path / "notes")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    yield process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too, should they have outlived it
    process.communicate()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parent", "number", "to_group", "said"),
    [
        pytest.param("sleep", signal.SIGINT, True, "KeyboardInterrupt\n", marks=marks_at(0)),
        pytest.param("collective", signal.SIGINT, True, "KeyboardInterrupt\n", marks=marks_at(1)),
        pytest.param("collective", signal.SIGINT, False, "KeyboardInterrupt\n", marks=marks_at(2)),
        ("sleep", signal.SIGTERM, False, "SystemExit 143\n"),
        ("stubborn", signal.SIGTERM, True, "SystemExit 143\n"),
    ],
    indirect=["parent"],
)
def test_a_signal_ends_every_rank_without_noise(
    parent: subprocess.Popen, number: signal.Signals, to_group: bool, said: str, tmp_path: Path
) -> None:
    ranks = children(parent.pid)
    assert len(ranks) == 4
    begin = time.monotonic()
    (os.killpg if to_group else os.kill)(parent.pid, number)
    out, err = parent.communicate(timeout=15)
    # Only ranks that do not want to end are given time.
    assert time.monotonic() - begin < (10 if "stubborn" in parent.args else watch_ranks.GRACE)  # type: ignore[operator]
    assert (out, err) == (said, "")
    assert list((tmp_path / "notes").iterdir()) == []
    assert gone(ranks, within=0.1)


@pytest.mark.ranks
@pytest.mark.parametrize("parent", ["stubborn"], indirect=True)
def test_no_rank_outlives_a_parent_that_is_killed(parent: subprocess.Popen) -> None:
    ranks = children(parent.pid)
    assert len(ranks) == 4
    parent.kill()
    assert gone(ranks, within=2)


@pytest.mark.ranks
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_ctrl_c_while_ranks_are_being_started_leaves_none(delay: float) -> None:
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        run_ranks(time.sleep, 8, 100)
    timer.join()


# The many starts of a large group


def start_sixteen() -> float:
    def worker() -> int:
        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total.item())

    begin = time.monotonic()
    assert run_ranks(worker, 16, timeout=60) == [16] * 16
    return time.monotonic() - begin


@pytest.mark.ranks
def test_sixteen_ranks_start_twice() -> None:
    for _ in range(2):
        start_sixteen()


@pytest.mark.ranks
@pytest.mark.slow
def test_sixteen_ranks_start_fifty_times() -> None:
    seconds = sorted(start_sixteen() for _ in range(50))
    print(f"16 ranks, 50 starts: median {seconds[25]:.2f} s, {seconds[0]:.2f} to {seconds[-1]:.2f} s")


def test_the_public_names() -> None:
    assert set(launch.__all__) == {
        "LaunchError",
        "OutsideRanks",
        "join",
        "leave",
        "outside_ranks",
        "start",
    }
