"""The reasons why the ranks of one start ended, from their notes and the exit codes of their processes."""

from __future__ import annotations

import math
import signal
import textwrap
from collections.abc import Iterator, Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.launch import records
from parallelizer.runtime.launch.failures import Failure, LaunchError
from parallelizer.runtime.launch.lookout import ranks_text
from parallelizer.runtime.launch.restarts import End
from parallelizer.runtime.launch.watch import Watch

LAG = 0.25
"""Seconds by which other ranks may notice the end of a rank (its sockets close) before its parent does."""


def what_happened(watch: Watch, trouble: Exception) -> LaunchError | PlanError:
    """Why the ranks ended, told by the one that failed first; the others mostly failed because it was gone.

    `trouble` is what the elastic agent raised. Call it when no rank is left and the watcher has ended.
    """
    if watch.late is not None:
        return watch.late
    failures = _failures(watch, trouble)
    # When the agent fails before it has started every rank, it kills those it had started: their ends say nothing.
    stillborn = not isinstance(trouble, ChildFailedError) and len(watch.processes) < watch.job.ranks
    if not failures or (stillborn and not watch.ranks("failed")):
        return LaunchError(f"the ranks could not be started: {type(trouble).__name__}: {trouble}")
    first, *others = failures
    if first.diagnostics is not None:
        return PlanError(first.diagnostics)
    beat = watch.beats()[first.rank]
    where = f", in step {beat.step}" if beat is not None and beat.step else ""
    parts = [f"rank {first.rank} of {watch.job.ranks} {first.line}{where}"]
    if first.text:
        parts.append(f"\n{first.text.rstrip()}\n")
    parts += _followers(others)
    found = watch.lacking()
    help = _help(watch, first, others, bool(found))
    return LaunchError("\n".join([*parts, *found]), help)


MOST_FOLLOWERS = 8
"""Ranks that failed by themselves, behind the first, of which each has a line."""


def _followers(others: Sequence[Failure]) -> Iterator[str]:
    """One line for each other rank, or for those that say the same."""
    alike: dict[str, list[int]] = {}
    for failure in others:
        alike.setdefault(failure.line, []).append(failure.rank)
    for line, ranks in list(alike.items())[:MOST_FOLLOWERS]:
        yield f"then {ranks_text(ranks)} {textwrap.shorten(line, 200, placeholder=' ...')}"
    if rest := {rank for ranks in list(alike.values())[MOST_FOLLOWERS:] for rank in ranks}:
        yield f"and {ranks_text(rest)} after them"


def who_ended(watch: Watch, trouble: Exception, error: LaunchError) -> End:
    """The end of an attempt as it counts for starting again; `error` is what `what_happened` made of it."""
    failures = [] if watch.late is not None else _failures(watch, trouble)
    line = error.message.splitlines()[0]
    if failures:
        line = f"rank {failures[0].rank} of {watch.job.ranks} {failures[0].line}"
    rank = min(watch.blamed, default=None) if watch.late is not None else None
    rank = failures[0].rank if failures else rank
    beat = None if rank is None else watch.beats()[rank]
    return End(rank, None if beat is None else beat.step, line, raised=bool(failures and failures[0].text))


def has_obeyed(watch: Watch, trouble: Exception) -> bool:
    """Whether the ranks were asked to save and stop, and the first that did not return ended for no other reason. One
    that listens to no request ends by the signal itself.
    """
    if not watch.asked:
        return False
    failures = _failures(watch, trouble)
    by_signal = [
        watch.deaths[pid]
        for pid, p in watch.processes.items()
        if pid in watch.deaths and _obeys(watch, p.exitcode)
    ]
    return not failures or any(when - LAG <= failures[0].when for when in by_signal)


def _obeys(watch: Watch, code: int | None) -> bool:
    return watch.asked != 0 and code in (-watch.asked, 128 + watch.asked)


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
        if rank not in known and not by_agent and not by_watcher and not _obeys(watch, code):
            failures.append(Failure(rank, _ending(code), when=died - LAG))
    return sorted(failures, key=lambda failure: (failure.when, failure.rank))


def _ending(code: int | None) -> str:
    if code is None:
        return "was lost: its exit status is not known"
    if code >= 0:
        return f"ended with exit code {code} before its work was done"
    try:
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    except ValueError:
        return f"was killed by signal {-code} (exit code {code})"


def _help(watch: Watch, first: Failure, others: Sequence[Failure], recorded: bool) -> str | None:
    lines = []
    if "SIGKILL" in first.line and not first.text:
        lines.append(
            "the system does this when memory runs out: see `dmesg`; use a smaller model or fewer ranks"
        )
    folder = watch.job.log_dir
    if first.log is not None:
        lines.append(f"its traceback: {first.log}")
    elif folder is not None and first.rank > 0:
        lines.append(f"its output: {folder / f'rank{first.rank}.log'}")
    if folder is not None and others:
        lines.append(f"the others' tracebacks: {folder / 'rank*.log'}")
    if folder is not None and recorded:
        lines.append(
            f"torch's program `torchfrtrace` prints the records of collectives: {records.prefix(folder)}*"
        )
    return "\n".join(lines) or None
