"""The ranks of one start as their parent sees them: watching them, ending them, and saying why they ended."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import textwrap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from parallelizer.diagnostics import PlanError
from parallelizer.rank import Failure, Job, LaunchError

GRACE = 5.0
"""Seconds between asking a rank to end (SIGTERM) and ending it (SIGKILL)."""

PERIOD = 0.05
"""Seconds between two looks at the ranks."""

LAG = 0.25
"""Seconds by which other ranks may notice the end of a rank (its sockets close) before its parent does."""


@dataclass
class Watch:
    """The ranks as their parent sees them; the watcher writes, and others read when it has ended."""

    job: Job
    strangers: frozenset[BaseProcess]
    """Child processes that were there before."""
    processes: dict[int, BaseProcess] = field(default_factory=dict)
    """The ranks' processes by process id, from the moment that they were first seen, dead or alive."""
    deaths: dict[int, float] = field(default_factory=dict)
    """When a process ended, by process id."""
    started: bool = False
    """Whether every rank has started."""
    ending_since: float | None = None
    """When the watcher began to end the ranks."""
    late: LaunchError | None = None
    """What to say of the ranks that did not start in time."""

    def ranks(self, kind: str) -> set[int]:
        """The ranks that have left such a note."""
        return {int(path.suffix[1:]) for path in self.job.folder.glob(f"{kind}.*")}

    def note(self, kind: str, rank: int) -> Any:
        """What a rank has noted."""
        return pickle.loads((self.job.folder / f"{kind}.{rank}").read_bytes())

    def pids(self) -> dict[int, int]:
        """Process ids by rank, of the ranks that were born."""
        return {rank: self.note("born", rank) for rank in self.ranks("born")}

    def children(self) -> list[BaseProcess]:
        """Our ranks' processes that live: every new child until there are as many as ranks, then those.

        Looking for them reaps those that have ended, which the agent wants to do itself. So this is for the
        time of starting and the time of ending; should the agent stumble then, the notes are believed.
        """
        children = [p for p in multiprocessing.active_children() if p not in self.strangers]
        if len(self.processes) < self.job.ranks:
            return children
        return [p for p in children if p.pid in self.processes]


def keep_watch(watch: Watch, start_timeout: float, got: Sequence[int], over: threading.Event) -> None:
    """Until `over`: know the ranks' processes and when they end, and end them all when there is reason to.

    A reason is a signal in `got`, a rank that has not started after `start_timeout` seconds, or one that
    ended while the others go on.
    """
    begin = time.monotonic()
    kill_at = math.inf
    asked: set[BaseProcess] = set()
    while not over.is_set():
        meeting = len(watch.processes) < watch.job.ranks
        if meeting:
            watch.processes.update({p.pid: p for p in watch.children() if p.pid is not None})
        _await_deaths(watch, PERIOD / 10 if meeting else PERIOD, over)
        now = time.monotonic()
        if watch.ending_since is None:
            grace = _must_end(watch, start_timeout if now - begin > start_timeout else None, got)
            if grace is not None:
                watch.ending_since, kill_at = now, now + grace
        if watch.ending_since is not None:
            for process in watch.children():
                if now >= kill_at:
                    process.kill()
                elif process not in asked:
                    process.terminate()
                    asked.add(process)


def _must_end(watch: Watch, overdue: float | None, got: Sequence[int]) -> float | None:
    """The seconds of grace to end the ranks with, or None while they may go on."""
    if got:
        return GRACE
    if _is_stuck(watch):
        return 0.0  # the agent has asked them already
    if not watch.started:
        late = set(range(watch.job.ranks)) - watch.ranks("started")
        watch.started = not late
        if late and overdue is not None:
            watch.late = _lateness(watch, late, overdue)
            return GRACE
    return None


def _await_deaths(watch: Watch, seconds: float, over: threading.Event) -> None:
    """Wait so long, or until a process ends, and note when it did."""
    living = {p.sentinel: pid for pid, p in watch.processes.items() if pid not in watch.deaths}
    if not living:
        over.wait(seconds)
        return
    ended = multiprocessing.connection.wait(list(living), seconds)
    now = time.monotonic()
    watch.deaths.update({pid: now for sentinel, pid in living.items() if sentinel in ended})


def _is_stuck(watch: Watch) -> bool:
    """Whether a rank ended early, and the agent has not got the others to end since."""
    if not watch.deaths or time.monotonic() - min(watch.deaths.values()) < GRACE:
        return False
    pids, finished = watch.pids(), watch.ranks("finished")
    return not watch.deaths.keys() <= {pid for rank, pid in pids.items() if rank in finished}


def _lateness(watch: Watch, late: set[int], start_timeout: float) -> LaunchError:
    stands = _stacks(watch, late)
    # A rank inside torch's own group making or all-reduce waits for the others: it is not to blame.
    waiting = {rank for rank, (file, _) in stands.items() if file.endswith("distributed_c10d.py")}
    blamed = late - waiting or late
    message = (
        f"{_ranks(blamed)} of {watch.job.ranks} had not reached {'its' if len(blamed) == 1 else 'their'} "
        f"first all-reduce after {start_timeout:g} s"
    )
    lines = [f"rank {rank} stood in {stands[rank][1]}" for rank in sorted(blamed) if rank in stands]
    if blamed != late:
        lines.append(f"{_ranks(waiting)} waited for {'it' if len(blamed) == 1 else 'them'}")
    return LaunchError(message, "\n".join(lines) or None)


def _stacks(watch: Watch, ranks: set[int]) -> dict[int, tuple[str, str]]:
    """File and description of the innermost Python frame of those ranks that answer within a second."""
    pids = watch.pids()
    asked = ranks & watch.ranks("stack") & pids.keys()
    for rank in asked:
        with suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGUSR1)
    answers: dict[int, tuple[str, str]] = {}
    until = time.monotonic() + 1.0
    while len(answers) < len(asked) and time.monotonic() < until:
        time.sleep(PERIOD)
        for rank in asked - answers.keys():
            text = (watch.job.folder / f"stack.{rank}").read_text(errors="replace")
            if match := re.search(r'File "(.*)", line (\d+) in (.*)\n', text):
                answers[rank] = (match[1], f"{match[3]} ({match[1]}:{match[2]})")
    return answers


def end(processes: Sequence[BaseProcess]) -> None:
    """End processes and wait for it: the agent forgets ranks whose start it did not see through."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(GRACE)


def what_happened(watch: Watch, trouble: Exception) -> LaunchError | PlanError:
    """Why the ranks ended, told by the one that failed first; the others mostly failed because it was gone.

    `trouble` is what the elastic agent raised. Call it when no rank is left and the watcher has ended.
    """
    if watch.late is not None:
        return watch.late
    failures = _failures(watch, trouble)
    if not failures:
        return LaunchError(f"the ranks could not be started: {type(trouble).__name__}: {trouble}")
    first, *others = failures
    if first.diagnostics is not None:
        return PlanError(first.diagnostics)
    parts = [f"rank {first.rank} of {watch.job.ranks} {first.line}"]
    if first.text:
        parts.append(f"\n{first.text.rstrip()}\n")
    if others:
        line = textwrap.shorten(others[0].line, 200, placeholder=" ...")
        parts.append(f"then rank {others[0].rank} {line}")
    if rest := {failure.rank for failure in others[1:]}:
        parts.append(f"and {_ranks(rest)} after it")
    return LaunchError("\n".join(parts), _help(watch, first))


def _failures(watch: Watch, trouble: Exception) -> list[Failure]:
    """Every rank that ended by itself without finishing, in order of time."""
    failures: list[Failure] = [watch.note("failed", rank) for rank in watch.ranks("failed")]
    pids = watch.pids()
    codes = {rank: watch.processes[pid].exitcode for rank, pid in pids.items() if pid in watch.processes}
    agent = trouble.failures if isinstance(trouble, ChildFailedError) else {}
    named = {rank: failure.exitcode for rank, failure in agent.items()}
    known = {failure.rank for failure in failures} | (watch.ranks("finished") - named.keys())
    times = sorted(watch.deaths.values())
    for rank, code in {**named, **codes}.items():
        died = watch.deaths.get(pids.get(rank, -1), -math.inf)
        # The agent ends the others when one has ended, so the first to end was not ended by it.
        foremost = times[:1] == [died] and times.count(died) == 1
        by_agent = code == -signal.SIGTERM and rank not in named and not foremost
        by_watcher = watch.ending_since is not None and died >= watch.ending_since
        if rank not in known and not by_agent and not by_watcher:
            failures.append(Failure(rank, _ending(code), when=died - LAG))
    return sorted(failures, key=lambda failure: (failure.when, failure.rank))


def _ending(code: int | None) -> str:
    if code is None:
        return "was lost: nothing is known of its end"
    if code >= 0:
        return f"ended with exit code {code} before its work was done"
    try:
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    except ValueError:
        return f"was killed by signal {-code} (exit code {code})"


def _help(watch: Watch, first: Failure) -> str | None:
    lines = []
    if "SIGKILL" in first.line and not first.text:
        lines.append(
            "the system kills so when memory runs out: see `dmesg`, or take a smaller model or fewer ranks"
        )
    if first.log is not None:
        lines.append(f"its traceback: {first.log}")
    elif watch.job.log_dir is not None and first.rank > 0:
        lines.append(f"its output: {watch.job.log_dir / f'rank{first.rank}.log'}")
    return "\n".join(lines) or None


def _ranks(ranks: set[int]) -> str:
    """`rank 3`, `ranks 3, 7`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)
