"""Runs one case as the command line does, in this process or in one of its own, and measures it."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallelizer.commands.main import main
from parallelizer.diagnostics.diagnostic import PlanError
from tests.fuzz.corpus import ROOT, Case

GIVE_UP = 20.0
"""Seconds after which a case is stopped."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended. `seconds` are of this process's processor time, `elapsed` on the clock; `grown` is by
    how many bytes the address space grew at most; `crash` is a traceback.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    elapsed: float
    grown: int
    crash: str = ""


class _Stopped(BaseException):
    """The case has taken too long."""


def write(case: Case, folder: Path) -> list[str]:
    """Write the case's file, if it has one. Returns the arguments of the command."""
    asked = ["validate", "--quick", *(["--json"] if case.as_json else [])]
    if case.kind == "override":
        return (
            [*asked, "--", *case.words]
            if any(w.startswith("-") for w in case.words)
            else [*asked, *case.words]
        )
    if case.kind == "preset":
        presets = folder / "configs" / "parallel"
        presets.mkdir(parents=True, exist_ok=True)
        (presets / "fuzzed.yaml").write_bytes(case.content)
        return [*asked, "--config-dir", str(folder / "configs"), "parallel=fuzzed"]
    (folder / "fuzzed.yaml").write_bytes(case.content)
    return [*asked, str(folder / "fuzzed.yaml")]


def run(case: Case, folder: Path) -> Outcome:
    """Run a case in this process, through the function that the command is. A plan that is well formed is then
    compiled for a model too.
    """
    arguments = write(case, folder)
    out, err = io.StringIO(), io.StringIO()
    status: int | None = None
    crash = ""
    before, began, begun = _memory("VmSize"), time.perf_counter(), time.process_time()
    peak = _memory("VmPeak")
    try:
        with _limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
            if status == 0 and case.kind == "plan":
                _compile(arguments[-1])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except _Stopped:
        crash = f"stopped after {GIVE_UP} s"
    except BaseException:
        crash = traceback.format_exc(limit=-8)
    seconds, elapsed = time.process_time() - begun, time.perf_counter() - began
    after = _memory("VmPeak")
    grown = max(after - before if after > peak else 0, _memory("VmSize") - before)
    return Outcome(status, out.getvalue(), err.getvalue(), seconds, elapsed, grown, crash)


def run_apart(case: Case, folder: Path) -> Outcome:
    """Run a case as people do, in a process of its own, whose start is not counted."""
    began = time.perf_counter()
    words = [word.encode("utf-8", "surrogateescape") for word in write(case, folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "parallelizer", *words],  # type: ignore[list-item]
        capture_output=True,
        env=environment,
        timeout=3 * GIVE_UP,
        check=False,
    )
    out, err = ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace")
    crash = err if "Traceback" in err or ended.returncode < 0 else ""
    return Outcome(ended.returncode, out, err, 0.0, time.perf_counter() - began, 0, crash)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Stop a case that takes too long, and refuse it memory that would harm others."""

    def stop(*_: Any) -> None:
        raise _Stopped

    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + 2**30, limits[1]))
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, GIVE_UP)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _memory(what: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        line = next(line for line in lines if line.startswith(what))
    return int(line.split()[1]) * 1024


@lru_cache(maxsize=1)
def _setup() -> Any:
    from parallelizer.configuration.compose import compose_config
    from parallelizer.configuration.read_setup import from_config

    setup = from_config(*compose_config(["parallel=fsdp2_cp2_tp2"]))
    return setup, setup.build_model()


def warm_up() -> None:
    """Load what every case needs, so that the first one does not pay for it."""
    setup, model = _setup()
    setup.compile(model)
    with contextlib.redirect_stdout(io.StringIO()):
        main(["validate", "--quick", "--json", "parallel=tp2"])


def _compile(path: str) -> None:
    """What the full check does with a plan before the step is traced."""
    from parallelizer.compiler.compile import compile as compile_plan
    from parallelizer.language.load import load_plan

    setup, model = _setup()
    with contextlib.suppress(PlanError):
        compile_plan(load_plan(path), model, setup.mesh, workload=setup.workload, defaults=setup.defaults)
