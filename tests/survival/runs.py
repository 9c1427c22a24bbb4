"""Real runs of the recipe's command, and what they leave: samples that were taken, deaths, the last checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint.loading import open_checkpoint
from parallelizer.training import run
from recipes.train import train
from tests.survival.victim import NOTES, PLOT, Death

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "model.dim=32", "model.n_layers=1", "model.n_heads=8", "model.n_kv_heads=4", "model.hidden_dim=48",
    "model.max_seq_len=32", "train.seq_len=16", "train.batch_size=8", "train.eval_batches=1", "device=cpu",
    "data=text", "data._target_=tests.survival.victim.load", f"data.path={ROOT / 'LICENSE'}", "train.log_every=1000",
    "train.eval_every=0", "launch.start_timeout=60", "launch.collective_timeout=60",
)  # fmt: skip


class Command:
    """`python -m recipes.train`, forked from this process: what takes longest, to import torch, is done here once."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], out: Path) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                with open(out, "wb") as stream:
                    os.dup2(stream.fileno(), 1)
                    os.dup2(stream.fileno(), 2)
                sys.stdout, sys.stderr = (open(n, "w", 1, closefd=False) for n in (1, 2))  # noqa: SIM115
                os.environ.update(variables)
                sys.argv = ["recipes/train.py", *words]
                run(train)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 70
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """The exit status; of a signal its negative number; None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, timeout: float) -> int:
        """The exit status. TimeoutError."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait(30)

    def terminate(self) -> None:
        """SIGTERM, which saves and ends; a second one ends at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


@dataclass
class Run:
    """One run in one folder, which may take several commands."""

    folder: Path
    overrides: Sequence[str]
    plot: Sequence[Death] = ()
    jobs: int = 0
    sessions: set[int] = field(default_factory=set)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, *more: str) -> Command:
        """The command, beside this process, in a session of its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jobs += 1
        variables = {
            NOTES: str(self.folder),
            PLOT: json.dumps([asdict(death) for death in self.plot]),
            "SURVIVAL_CHECKPOINTS": str(self.checkpoints),
            "SURVIVAL_JOB": str(self.jobs),
        }
        words = [*TINY, *self.overrides, *more, f"hydra.run.dir={self.folder}"]
        command = Command(words, variables, self.folder / f"out.{self.jobs}")
        self.sessions.add(command.pid)
        return command

    def finish(self, *more: str, timeout: float = 600) -> None:
        """The command from beginning to end. RuntimeError with what it said, when it fails."""
        process = self.start(*more)
        try:
            status = process.wait(timeout)
        except TimeoutError:
            process.terminate()
            raise RuntimeError(f"{self.folder} hangs:\n{self.said()[-3000:]}") from None
        if status:
            raise RuntimeError(f"{self.folder} ended with {status}:\n{self.said()[-3000:]}")

    def said(self) -> str:
        return (self.folder / f"out.{self.jobs}").read_text(errors="replace")

    def processes(self) -> list[int]:
        """Those of this run that are still there."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) in self.sessions and state != "Z":
                found.append(int(path.parent.name))
        return found

    def ranks(self, parent: int) -> list[int]:
        """The processes of the ranks, in their order: the launcher forks them one after another."""
        try:
            children = Path(f"/proc/{parent}/task").glob("*/children")
            return sorted(int(pid) for path in children for pid in path.read_text().split())
        except OSError:
            return []

    def metrics(self) -> list[dict[str, float]]:
        """Line by line; the last one may be half there."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.is_file() else []
        return [json.loads(line) for line in lines]

    def taken(self) -> list[dict[str, Any]]:
        """What the ranks took of the data, in order of time."""
        found = []
        for path in self.folder.glob("samples.*"):
            for line in path.read_text().split("\n"):
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue  # it was killed there
        return sorted(found, key=lambda note: float(note["time"]))

    def deaths(self) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in self.folder.glob("death.*")]
        return sorted(found, key=lambda note: float(note["time"]))

    def last(self) -> Path:
        """The newest checkpoint."""
        return self.checkpoints / names.name(names.steps_in(self.checkpoints)[-1])


def tensors_of(checkpoint: Path, *parts: str) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint by name, read by torch alone, of the named parts: `model.`, `optimizer.`, `random.`"""
    stored = open_checkpoint(checkpoint).metadata.state_dict_metadata
    wanted = {
        name: torch.empty(list(t.size), dtype=t.properties.dtype)  # type: ignore[union-attr]
        for name, t in stored.items()
        if name.startswith(parts)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return wanted


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, kinds of numbers, sizes and numbers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def trained_on(taken: Iterable[Mapping[str, Any]]) -> list[str]:
    """The samples that the last state was made of, in order: of each number what was taken last. ValueError when a number
    is missing, or ranks took different samples for one.
    """
    latest: dict[int, tuple[str, str]] = {}
    for note in taken:
        for offset, sample in enumerate(note["samples"]):
            number = int(note["first"]) + offset
            life, other = latest.get(number, ("", ""))
            if life == note["life"] and other != sample:
                raise ValueError(f"sample {number} is {other} for one rank and {sample} for another")
            latest[number] = (str(note["life"]), sample)
    if sorted(latest) != list(range(len(latest))):
        missing = sorted(set(range(max(latest) + 1)) - set(latest))
        raise ValueError(f"samples {missing[:5]} were skipped")
    return [latest[number][1] for number in range(len(latest))]


def lives(taken: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """What was taken, start by start of the ranks."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for note in taken:
        found.setdefault(str(note["life"]), []).append(note)
    return list(found.values())


def redone(run: Run) -> tuple[int, int]:
    """(the most steps that a start of ranks did again, of how many a start went back behind the newest checkpoint that
    there was): the second is to be 0.
    """
    most = too_old = 0
    starts = lives(run.taken())
    for death in run.deaths():
        before = [n for life in starts for n in life if n["time"] <= death["time"]]
        after = [life for life in starts if life[0]["time"] > death["time"]]
        there = [names.step_of(Path(name)) for name in death["there"]]
        newest = max((step for step in there if step is not None), default=0)
        if before and after:
            begun = max(int(n["step"]) for n in before if n["life"] == before[-1]["life"])
            first = min(int(n["step"]) for n in after[0])
            most = max(most, begun - first + 1)
            too_old += first <= newest
    return most, too_old


def recoveries(run: Run) -> list[float]:
    """Seconds from each death to the end of the first step behind it: until its ranks take their second batch."""
    found, taken = [], [n for n in run.taken() if n["rank"] == 0]
    for death in run.deaths():
        later = [n for n in taken if n["time"] > death["time"]]
        first = [life for life in lives(later) if life[0]["life"] != death["life"] and len(life) > 1]
        if first:
            found.append(float(first[0][1]["time"]) - float(death["time"]))
    return found


def wait_until(true: Any, timeout: float, what: str, period: float = 0.01) -> None:
    """RuntimeError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {timeout:.0f} s")
        time.sleep(period)
