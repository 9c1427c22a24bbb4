"""What is told of a start that failed, from the notes of its ranks and the ends of their processes."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.runtime.launch.ends import LAG, MOST_FOLLOWERS, has_obeyed, what_happened, who_ended
from parallelizer.runtime.launch.failures import Failure, LaunchError
from parallelizer.runtime.launch.heartbeat import Beats
from parallelizer.runtime.launch.rank import Launch
from parallelizer.runtime.launch.watch import Watch


class Ended:
    """A process that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """Four ranks with process ids 100 to 103, all born."""
    job = Launch(print, (), 4, "cpu", None, 600.0, 0, tmp_path, 1)
    watch = Watch(job, frozenset())
    for rank in range(4):
        note(watch, "born", rank, 100 + rank)
    return watch


def note(watch: Watch, kind: str, rank: int, content: Any = None) -> None:
    (watch.job.folder / f"{kind}.{rank}").write_bytes(pickle.dumps(content))


def ended(watch: Watch, rank: int, exitcode: int, when: float) -> None:
    watch.processes[100 + rank] = Ended(exitcode)  # type: ignore[assignment]
    watch.deaths[100 + rank] = when


def failed(watch: Watch, rank: int, line: str, when: float) -> None:
    note(watch, "failed", rank, Failure(rank, line, f"traceback of {rank}", None, when))
    ended(watch, rank, 1, when + 0.01)


def agent(rank: int, exitcode: int) -> ChildFailedError:
    return ChildFailedError("worker", {rank: ProcessFailure(rank, 100 + rank, exitcode, "/dev/null")})


def told(watch: Watch, trouble: Exception) -> list[str]:
    error = what_happened(watch, trouble)
    assert isinstance(error, LaunchError)
    return error.message.splitlines()


def test_the_rank_that_failed_first_is_told_whole_and_the_others_in_short(watch: Watch) -> None:
    failed(watch, 0, "failed: late", 7.0)
    failed(watch, 1, "failed: later", 8.0)
    failed(watch, 3, "failed: " + "first " * 100, 6.0)
    ended(watch, 2, -signal.SIGTERM, 9.0)
    lines = told(watch, agent(0, 1))
    assert lines[0].startswith("rank 3 of 4 failed: first first")
    assert lines[2:] == ["traceback of 3", "", "then rank 0 failed: late", "then rank 1 failed: later"]


def test_ranks_that_say_the_same_share_a_line_and_there_are_not_too_many_lines(watch: Watch) -> None:
    watch.job.__dict__["ranks"] = 30
    failed(watch, 3, "failed: the reason", 5.0)
    for rank in (0, 1, 2, 7):
        failed(watch, rank, "lost another rank: Connection closed", 6.0)
    for rank in range(10, 10 + MOST_FOLLOWERS + 2):
        failed(watch, rank, f"failed: in its own way, {rank}", 7.0)
    lines = told(watch, agent(0, 1))[4:]
    assert lines[0] == "then ranks 0-2, 7 lost another rank: Connection closed"
    assert len(lines) == MOST_FOLLOWERS + 1 and lines[-1] == "and ranks 17-19 after them"


def test_the_step_in_which_it_ended_is_told(watch: Watch) -> None:
    Beats(watch.job.folder / "beats", 4).say(1, 7, "step")
    failed(watch, 1, "failed: the reason", 5.0)
    assert told(watch, agent(1, 1))[0] == "rank 1 of 4 failed: the reason, in step 7"


def test_what_follows_in_short_is_cut(watch: Watch) -> None:
    failed(watch, 0, "failed: first", 6.0)
    failed(watch, 1, "failed: " + "second " * 100, 7.0)
    assert len(told(watch, agent(0, 1))[-1]) < 230


def test_a_killed_rank_comes_before_those_that_noticed_sooner_than_the_parent(watch: Watch) -> None:
    failed(watch, 0, "failed: connection closed", 5.0)
    ended(watch, 1, -signal.SIGKILL, 5.0 + LAG / 2)
    assert told(watch, agent(0, 1))[0] == "rank 1 of 4 was killed by SIGKILL (exit code -9)"


def test_a_rank_that_crashes_long_after_the_first_failure_does_not_come_before_it(watch: Watch) -> None:
    failed(watch, 0, "failed: the reason", 5.0)
    ended(watch, 1, -signal.SIGABRT, 5.0 + LAG * 2)
    lines = told(watch, agent(1, -6))
    assert lines[0] == "rank 0 of 4 failed: the reason"
    assert lines[-1] == "then rank 1 was killed by SIGABRT (exit code -6)"


def test_ranks_that_the_agent_ended_have_not_failed(watch: Watch) -> None:
    failed(watch, 0, "failed: the reason", 5.0)
    for rank in (1, 2, 3):
        ended(watch, rank, -signal.SIGTERM, 5.05)
    assert told(watch, agent(0, 1))[-1] == "traceback of 0"


def test_a_rank_that_somebody_else_terminated_has_failed(watch: Watch) -> None:
    ended(watch, 1, -signal.SIGTERM, 5.0)
    failed(watch, 0, "failed: connection closed", 5.01)
    ended(watch, 2, -signal.SIGTERM, 5.05)
    lines = told(watch, agent(0, 1))
    assert lines == [
        "rank 1 of 4 was killed by SIGTERM (exit code -15)",
        "then rank 0 failed: connection closed",
    ]


def test_ranks_that_the_watcher_ended_have_not_failed(watch: Watch) -> None:
    ended(watch, 1, 0, 5.0)
    watch.ending_since = 10.0
    for rank in (0, 2, 3):
        ended(watch, rank, -signal.SIGKILL, 10.1)
    assert told(watch, agent(0, -9)) == ["rank 1 of 4 ended with exit code 0 before its work was done"]


def test_a_rank_that_crashes_after_its_work_is_told_when_the_agent_stops_at_it(watch: Watch) -> None:
    for rank in range(4):
        note(watch, "finished", rank)
        ended(watch, rank, -signal.SIGSEGV if rank == 2 else 0, 5.0)
    assert told(watch, agent(2, -11)) == ["rank 2 of 4 was killed by SIGSEGV (exit code -11)"]


def test_a_rank_that_died_unseen_is_told_from_what_the_agent_says(watch: Watch) -> None:
    assert told(watch, agent(3, -9)) == ["rank 3 of 4 was killed by SIGKILL (exit code -9)"]


def test_the_first_failure_decides_between_a_plan_error_and_a_launch_error(watch: Watch) -> None:
    finding = Diagnostic("some-code", "what is wrong")
    note(watch, "failed", 2, Failure(2, "failed", "", (finding,), 5.0))
    failed(watch, 0, "failed: connection closed", 5.1)
    error = what_happened(watch, agent(0, 1))
    assert isinstance(error, PlanError)
    assert error.diagnostics == (finding,)

    failed(watch, 1, "failed: out of memory", 4.0)
    assert told(watch, agent(0, 1))[0] == "rank 1 of 4 failed: out of memory"


def test_an_agent_that_could_not_start_the_ranks_is_quoted(watch: Watch) -> None:
    trouble = OSError("no more processes")
    assert told(watch, trouble) == ["the ranks could not be started: OSError: no more processes"]


def test_the_ranks_that_a_failed_start_killed_are_not_to_blame(watch: Watch) -> None:
    ended(watch, 0, -signal.SIGKILL, 5.0)
    ended(watch, 1, -signal.SIGKILL, 5.1)
    trouble = OSError("no more processes")
    assert told(watch, trouble) == ["the ranks could not be started: OSError: no more processes"]


# What it means for starting again, and for a run that was asked to stop


def ended_as(watch: Watch, trouble: Exception) -> tuple[int | None, int | None, bool]:
    error = what_happened(watch, trouble)
    assert isinstance(error, LaunchError)
    end = who_ended(watch, trouble, error)
    return end.rank, end.step, end.raised


def test_an_end_is_that_of_the_first_rank_in_its_own_step(watch: Watch) -> None:
    beats = Beats(watch.job.folder / "beats", 4)
    beats.say(2, 8, "step")
    beats.say(3, 9, "step")
    failed(watch, 3, "failed: connection closed", 6.1)
    ended(watch, 2, -signal.SIGKILL, 6.0)
    assert ended_as(watch, agent(2, -9)) == (2, 8, False)
    failed(watch, 1, "failed: the reason", 5.0)
    assert ended_as(watch, agent(2, -9)) == (1, None, True)


def test_the_end_of_a_start_that_took_too_long_is_that_of_the_rank_to_blame(watch: Watch) -> None:
    watch.late, watch.blamed = LaunchError("late"), {3, 1}
    assert ended_as(watch, agent(0, -15)) == (1, None, False)


def test_ranks_that_end_by_the_request_have_obeyed(watch: Watch) -> None:
    watch.asked = signal.SIGUSR1
    ended(watch, 1, -signal.SIGUSR1, 5.0)
    ended(watch, 2, 128 + signal.SIGUSR1, 5.0)
    assert has_obeyed(watch, agent(1, -signal.SIGUSR1))
    failed(watch, 0, "failed: connection closed", 5.2)
    assert has_obeyed(watch, agent(1, -signal.SIGUSR1))


def test_a_rank_that_fails_first_or_is_killed_has_not_obeyed(watch: Watch) -> None:
    failed(watch, 0, "failed: no space left", 4.0)
    assert not has_obeyed(watch, agent(0, 1))  # nobody asked
    watch.asked = signal.SIGUSR1
    ended(watch, 1, -signal.SIGUSR1, 5.0)
    assert not has_obeyed(watch, agent(0, 1))
    ended(watch, 3, -signal.SIGKILL, 3.0)
    assert told(watch, agent(3, -9))[0] == "rank 3 of 4 was killed by SIGKILL (exit code -9)"
