"""One measurement in a process of its own, so that none of them can end, block or slow down another."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One line of a table: what was measured by its column."""


@dataclass(frozen=True)
class Where:
    """Where a case runs: the device, whether sizes are small enough for a CPU, and a folder of its own for files."""

    device: str
    small: bool
    folder: Path


@dataclass(frozen=True)
class Case:
    """A function of a module of this package that yields rows, with its arguments, and the seconds that it may take."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    limit: float = 120.0


@dataclass
class Outcome:
    """What became of a case: its rows, or why it has none, and how long it took in seconds."""

    name: str
    rows: list[Row] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0


RUNNING: set[subprocess.Popen[bytes]] = set()
"""The processes of cases."""


def side_by_side(outcome: Callable[[Case], Outcome], cases: Sequence[Case], jobs: int) -> Generator[Outcome]:
    """`outcome` of each case, in their order, of `jobs` cases at once. Where it ends early, so do the cases that run."""
    pool = ThreadPoolExecutor(jobs)
    futures = [pool.submit(outcome, case) for case in cases]
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
        while not all(future.done() for future in futures):
            for process in tuple(RUNNING):
                _end(process)
            time.sleep(0.1)
        pool.shutdown()


def run(case: Case, where: Where, limit: float) -> Outcome:
    """Run one case in a process of its own for at most `limit` seconds. What it printed stands in its folder's `log`.

    Rows that it had yielded before it failed, or before its time was up, are kept.
    """
    shutil.rmtree(where.folder, ignore_errors=True)  # a run would go on where the last one ended
    where.folder.mkdir(parents=True)
    rows, log = where.folder / "rows.jsonl", where.folder / "log"
    rows.write_text("")
    told = json.dumps([case.function.__module__, case.function.__name__, list(case.arguments)])
    call = [
        sys.executable,
        "-m",
        "benchmarks.gpu.cases",
        told,
        where.device,
        str(int(where.small)),
        str(where.folder),
    ]
    started = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(call, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        RUNNING.add(process)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
            RUNNING.discard(process)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    failure = "" if status == 0 else f"stopped after {limit:.0f} s" if status is None else _why(log, status)
    return Outcome(case.name, found, failure, time.perf_counter() - started)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started: torchrun gives each rank a session of its own."""
    for started in (*descendants(process.pid), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(started, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    told = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    children = [int(word) for word in told.split()]
    return [*children, *(one for child in children for one in descendants(child))]


def _why(log: Path, status: int) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{ended}: {lines[-1][:300] if lines else 'no output'}"


def main(words: Sequence[str]) -> None:
    """The process of a case: calls the function and appends each row to the file as soon as it is there."""
    told, device, small, folder = words
    module, function, arguments = json.loads(told)
    where = Where(device, small == "1", Path(folder))
    with (where.folder / "rows.jsonl").open("a", buffering=1) as rows:
        for row in getattr(importlib.import_module(module), function)(where, *arguments):
            rows.write(json.dumps(row, default=str) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
