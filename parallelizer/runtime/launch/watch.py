"""The parent's side of one start: watching the ranks, reporting those that hang, and ending them."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from parallelizer.runtime.launch import lacking, lookout, records
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.heartbeat import Beat, Beats
from parallelizer.runtime.launch.lookout import Lookout, ranks_text
from parallelizer.runtime.launch.rank import Launch
from parallelizer.runtime.launch.stacks import Stack, ask
from parallelizer.runtime.launch.stopping import Signals

GRACE = 5.0
"""Seconds between asking a rank to end (SIGTERM) and ending it (SIGKILL)."""

SOON = 2.0
"""The same where ranks take SIGTERM for a request: seconds after the first has ended, to say why they fail too."""

PERIOD = 0.05
"""Seconds between two looks at the ranks."""


@dataclass
class Watch:
    """The ranks as their parent sees them; the watcher writes, and others read when it has ended."""

    job: Launch
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
    blamed: set[int] = field(default_factory=set)
    """Those of them that the others waited for."""
    asked: int = 0
    """The signal by which the ranks were asked to save and stop, 0 while they were not."""
    since: float = field(default_factory=time.time)
    """When the attempt began, by the clock."""
    reported: tuple[float, Mapping[int, Beat | None]] | None = None
    """When the ranks had answered for the last report of a stall, and their beats then."""
    _beats: Beats | None = None

    def ranks(self, kind: str) -> set[int]:
        """The ranks that have left such a note."""
        return {int(path.suffix[1:]) for path in self.job.folder.glob(f"{kind}.*")}

    def note(self, kind: str, rank: int) -> Any:
        """What a rank has noted."""
        return pickle.loads((self.job.folder / f"{kind}.{rank}").read_bytes())

    def pids(self) -> dict[int, int]:
        """Process ids by rank, of the ranks that were born."""
        return {rank: self.note("born", rank) for rank in self.ranks("born")}

    def beats(self) -> dict[int, Beat | None]:
        """What each rank said last."""
        if self._beats is None:
            self._beats = Beats(self.job.folder / "beats", self.job.ranks)
        return {rank: self._beats.last(rank) for rank in range(self.job.ranks)}

    def lacking(
        self, since: float | None = None, within: float = 0.0, places: Mapping[int, str] | None = None
    ) -> list[str]:
        """Which ranks lack which collectives, by the records that ranks have written in this attempt, or after `since`; see
        `lacking.describe`. Without `since`, records of a stall that was reported do not count if a rank has gone on after it.
        """
        if self.job.log_dir is None:
            return []
        if since is None and self.reported is not None and self.reported[1] != self.beats():
            since = self.reported[0]
        read, unreadable = records.read_all(
            records.prefix(self.job.log_dir),
            self.job.ranks,
            self.since if since is None else since,
            within,
        )
        return lacking.describe(read, unreadable, places)

    def all_ended(self, since: float) -> bool:
        """Whether all ranks were seen, and the last of them ended `since` seconds ago or earlier."""
        ends = list(self.deaths.values())
        return len(ends) >= self.job.ranks and time.monotonic() - max(ends) > since

    def children(self) -> list[BaseProcess]:
        """Our ranks' processes that live: every new child until there are as many as ranks, then those.

        Looking for them reaps those that have ended, which the agent wants to do itself. So this is for the
        time of starting and the time of ending; should the agent stumble then, the notes are believed.
        """
        children = [p for p in multiprocessing.active_children() if p not in self.strangers]
        if len(self.processes) < self.job.ranks:
            return children
        return [p for p in children if p.pid in self.processes]


def keep_watch(watch: Watch, start_timeout: float, got: Signals, over: threading.Event) -> None:
    """Until `over`: know the ranks' processes and when they end, and end them all when there is reason to.

    A reason is a signal in `got`, a rank that has not started after `start_timeout` seconds, or one that
    ended while the others go on. A signal that asks to save and stop is passed on first, once all have started.
    Ranks that make no progress are named on stderr.
    """
    begin = time.monotonic()
    kill_at = stop_by = math.inf
    signalled: set[BaseProcess] = set()
    slow = Lookout(watch.job.stuck_after)
    while not over.is_set():
        meeting = len(watch.processes) < watch.job.ranks
        if meeting:
            watch.processes.update({p.pid: p for p in watch.children() if p.pid is not None})
        _await_deaths(watch, PERIOD / 10 if meeting else PERIOD, over)
        now = time.monotonic()
        late = set() if watch.started else set(range(watch.job.ranks)) - watch.ranks("started")
        watch.started = not late
        if got.stop and not watch.asked and watch.started:
            stop_by = now + watch.job.graceful
            _pass_on(watch, got.stop)
        if watch.ending_since is None:
            if late and not got and now - begin > start_timeout:
                watch.late = _lateness(watch, late, start_timeout)
            grace = _must_end(watch, got)
            if grace is None and now > stop_by:
                _say_unstopped(watch)
                grace = 0.0
            if grace is not None:
                watch.ending_since, kill_at = now, now + grace
            elif watch.started and slow.is_due(now):
                _look_out(watch, slow, now)
        if watch.ending_since is not None:
            for process in watch.children():
                if now >= kill_at:
                    process.kill()
                elif process not in signalled:
                    process.terminate()
                    signalled.add(process)


def _must_end(watch: Watch, got: Signals) -> float | None:
    """The seconds of grace to end the ranks with, or None while they may go on."""
    if got.at_once or _is_stuck(watch):
        # The agent has asked them, or we have.
        return 0.0 if watch.asked or not got else GRACE
    if watch.late is not None or (got and not watch.asked):
        return GRACE
    return None


def _pass_on(watch: Watch, number: int) -> None:
    watch.asked = number
    for pid in watch.processes.keys() - watch.deaths.keys():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _say_unstopped(watch: Watch) -> None:
    left = {rank for rank, pid in watch.pids().items() if pid not in watch.deaths}
    _say(
        f"{ranks_text(left)} of {watch.job.ranks} had not stopped {watch.job.graceful:g} s "
        f"after {signal.Signals(watch.asked).name}, and {'is' if len(left) == 1 else 'are'} ended"
    )


def _look_out(watch: Watch, slow: Lookout, now: float) -> None:
    """Say which ranks make no progress, and where they stand."""
    at_work = set(range(watch.job.ranks)) - watch.ranks("finished")
    beats = {rank: beat for rank, beat in watch.beats().items() if rank in at_work}
    seconds = slow.look(beats, now)
    if seconds is not None:
        since = time.time()
        records.ask(watch.job.folder, range(watch.job.ranks))
        looks = [_stacks(watch, at_work), _stacks(watch, at_work)]
        places = {rank: str(stack.place) for rank, stack in looks[-1].items()}
        within = records.ANSWER if records.listening(watch.job.folder) else 0.0
        found = watch.lacking(since, within, places)
        watch.reported = (time.time() + 2 * records.COARSE, watch.beats())
        _say(
            "\n".join(
                [lookout.describe(seconds, watch.job.ranks, beats, looks), *(f"  {line}" for line in found)]
            )
        )


def _say(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


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
    # Ranks that may be asked to stop take the agent's SIGTERM for that, and go on.
    grace = min(GRACE, SOON) if watch.job.graceful else GRACE
    if not watch.deaths or time.monotonic() - min(watch.deaths.values()) < grace:
        return False
    pids, finished = watch.pids(), watch.ranks("finished")
    return not watch.deaths.keys() <= {pid for rank, pid in pids.items() if rank in finished}


def _lateness(watch: Watch, late: set[int], start_timeout: float) -> LaunchError:
    stands = _stacks(watch, late)
    # A rank inside torch's own group making or all-reduce waits for the others: it is not to blame.
    waiting = {rank for rank, stack in stands.items() if stack.waits}
    blamed = watch.blamed = late - waiting or late
    message = (
        f"{ranks_text(blamed)} of {watch.job.ranks} had not reached {'its' if len(blamed) == 1 else 'their'} "
        f"first all-reduce after {start_timeout:g} s"
    )
    lines = [f"rank {rank} stood in {stands[rank].frames[0]}" for rank in sorted(blamed) if rank in stands]
    if blamed != late:
        lines.append(f"{ranks_text(waiting)} waited for {'it' if len(blamed) == 1 else 'them'}")
    return LaunchError(message, "\n".join(lines) or None)


def _stacks(watch: Watch, ranks: set[int]) -> dict[int, Stack]:
    """The stacks of those ranks that answer within a second."""
    pids = watch.pids()
    return ask(watch.job.folder, {rank: pids[rank] for rank in ranks & pids.keys()})


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
