"""The recipe as tests run it: its training in this process, or the whole command in a process of its own; and the
command line of the package.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelizer import __main__ as package
from parallelizer.configuration.compose import compose_config
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.command import run, run_sampling
from parallelizer.training.job.prepare import prepare
from parallelizer.training.job.run import started
from parallelizer.training.watch.result import Result
from recipes import generate, train

ROOT = Path(__file__).resolve().parents[2]

# Small, but with all that parallelism meets: shared key and value heads, two layers, several rows; and a text
# that is read in no time.
SMALL = (
    "model.dim=64",
    "model.n_layers=2",
    "model.n_heads=16",
    "model.n_kv_heads=8",
    "model.hidden_dim=96",
    "model.max_seq_len=64",
    "train.seq_len=64",
    "train.batch_size=8",
    "train.eval_batches=1",
    f"data.path={ROOT / 'LICENSE'}",
    "device=cpu",
    "train.prove=never",  # ten seconds: tests/training/job/test_proof.py
    "train.compare=false",  # a second or two for each run, and tests of its own: test_first_step.py
)


def run_here(folder: Path, *overrides: str) -> Result:
    """Compose and check in this process, and train in ranks forked from it."""
    job = prepare(*compose_config([*SMALL, *overrides]), folder)
    ranks = job.setup.mesh.world_size
    [first, *_] = launch.start(
        started, (train.train, job), ranks=ranks, device="cpu", start_timeout=60, collective_timeout=60
    )
    return first


def metrics(folder: Path) -> list[dict[str, float]]:
    """What a run has measured, step by step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit status and what it wrote."""

    status: int
    out: str
    err: str


COMMANDS: dict[str, Callable[[], int | None]] = {
    "recipes.train": lambda: run(train.train),
    "recipes.generate": lambda: run_sampling(generate.generate),
    "parallelizer": package.run,
}
"""What `python -m` runs, by module."""

FILES = {"recipes.train": train.__file__, "recipes.generate": generate.__file__}


def typed(*arguments: str, cwd: Path, module: str = "recipes.train", timeout: float = 180.0) -> Ended:
    """`python -m MODULE ARGUMENTS` in the folder `cwd`, in a process forked from this one.

    So it need not import torch again; all else is as for the command. A process that it leaves behind is an
    error.
    """
    if any(word.startswith("model=hf_") for word in arguments):  # a second, which each fork would take
        importlib.import_module("transformers.models.llama.modeling_llama")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            run_command(arguments, cwd, out.fileno(), err.fileno(), module)
        status = _wait(pid, timeout)
        left = in_session(pid)
        if left or status is None:
            os.killpg(pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        ended = Ended(-1 if status is None else status, out.read(), err.read())
    if status is None:
        raise TimeoutError(f"{arguments} ran for more than {timeout} s:\n{ended.out}\n{ended.err}")
    if left:
        raise RuntimeError(f"{arguments} left processes behind: {left}")
    return ended


def run_command(
    arguments: Sequence[str], cwd: Path, out: int, err: int, module: str = "recipes.train"
) -> None:
    """The command in this process, which has just been forked, and its end."""
    status = 1
    try:
        os.setsid()
        os.chdir(cwd)
        sys.path.insert(0, str(cwd))  # as `python -m` does
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - for as long as the process lives
        sys.argv = [FILES.get(module) or module, *arguments]
        status = COMMANDS[module]() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, timeout: float) -> int | None:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def in_session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) == leader and state != "Z":
            found.append(int(entry.name))
    return found


def command(*words: str, cwd: Path, timeout: float = 120.0) -> Ended:
    """A command of Python's as people type it, without the word `python`, in the folder `cwd`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    return Ended(ran.returncode, ran.stdout, ran.stderr)


def entries(folder: Path) -> list[str]:
    """Everything below a folder, folders too, as relative paths."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))
