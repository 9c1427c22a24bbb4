"""Inside a run that is to be killed: data that note which samples each rank takes, and a plot of who dies where.

A run has it by `data._target_=tests.survival.victim.load`; the folder for the notes is in the environment, with the plot. The
killing is real: SIGKILL, by the rank to itself, so that it happens at the very place that the plot names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint import hashed, manifest
from parallelizer.runtime.checkpoint.saving import Checkpoints
from parallelizer.training.data import text
from parallelizer.training.data.source import ALL, Baseline, Source
from parallelizer.training.keep.checkpoints import RunCheckpoints

NOTES, PLOT = "SURVIVAL_NOTES", "SURVIVAL_PLOT"
OF_ONE = ("manifest", "rename", "named", "remove")
"""Moments of a save that only rank 0 has."""
MOMENTS = ("step", "inside", "load", "copy", "write", "verify", *OF_ONE)


@dataclass(frozen=True)
class Death:
    """Rank `rank` dies once: when step `step` (from 1) begins, `after` seconds inside it, or in the save behind it. Of a
    `load` the step is the one that the checkpoint has.
    """

    rank: int
    step: int
    moment: str
    after: float = 0.0


def load(**keys: Any) -> Source:
    """A text whose samples are noted; the keys are those of `data=text`."""
    return Noted(text.load(**keys))


class Noted(Source):
    """Another source's batches."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.notes = Path(os.environ[NOTES])
        self.plot = [Death(**death) for death in json.loads(os.environ.get(PLOT, "[]"))]
        _lay(self)

    @property
    def baseline(self) -> Baseline:
        return self.inner.baseline

    def check_fits(self, seq_len: int) -> None:
        self.inner.check_fits(seq_len)

    def units(self, seq_len: int) -> int:
        return self.inner.units(seq_len)

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        batch = self.inner.training_batch(
            position, batch_size=batch_size, seq_len=seq_len, seed=seed, rows=rows
        )
        if "RANK" not in os.environ:  # the parent looks at what it is to give to the ranks
            return batch
        first, count = position + (rows.start or 0), len(next(iter(batch.values())))
        samples = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in batch["input_ids"]]
        note = {"life": _life(), "rank": _rank(), "time": time.time(), "step": position // batch_size + 1}
        note |= {"first": first, "count": count, "samples": samples}
        with open(self.notes / f"samples.{_rank()}", "a") as stream:
            stream.write(json.dumps(note) + "\n")
        self.dies(note["step"], "step")
        for number, death in enumerate(self.plot):
            if (death.rank, death.step, death.moment) == (_rank(), note["step"], "inside"):
                timer = threading.Timer(death.after, self._dies, [number, death])
                timer.daemon = True
                timer.start()
        return batch

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        return self.inner.heldout_batches(batch_size=batch_size, seq_len=seq_len, count=count, rows=rows)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    @property
    def files(self) -> Any:
        return self.inner.files

    def dies(self, step: int, moment: str) -> None:
        """Die here, if that is the plot."""
        for number, death in enumerate(self.plot):
            if (death.rank, death.step, death.moment) == (_rank(), step, moment):
                self._dies(number, death)

    def due(self, step: int, moment: str) -> bool:
        """Whether `dies` would not return."""
        return any(
            (d.rank, d.step, d.moment) == (_rank(), step, moment) and not (self.notes / f"death.{n}").exists()
            for n, d in enumerate(self.plot)
        )

    def _dies(self, number: int, death: Death) -> None:
        try:
            with open(self.notes / f"death.{number}", "x") as stream:
                folder = Path(os.environ["SURVIVAL_CHECKPOINTS"])
                there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
                stream.write(
                    json.dumps(asdict(death) | {"time": time.time(), "life": _life(), "there": there})
                )
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # it takes effect at once, but not always before this line


def _lay(source: Noted) -> None:
    """Lay the moments of saves and loads into the product's functions, in this process and what it forks."""
    saving = {"step": 0}

    def at(moment: str, owner: Any, name: str, *, behind: bool = False) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if behind:
                result = real(*args, **kwargs)
                source.dies(saving["step"], moment)
                return result
            source.dies(saving["step"], moment)
            return real(*args, **kwargs)

        setattr(owner, name, wrapped)

    save = Checkpoints.save

    def saved(self: Checkpoints, step: int, *args: Any, **kwargs: Any) -> None:
        self.wait()
        saving["step"] = step
        save(self, step, *args, **kwargs)

    def half(self: Any, data: Any) -> int:
        if source.due(saving["step"], "write") and memoryview(data).nbytes > 1000:
            self.file.write(memoryview(data).cast("B")[:900])
            self.file.flush()
            source.dies(saving["step"], "write")
        written: int = write(self, data)
        return written

    def half_removed(folder: Path, steps: Sequence[int]) -> None:
        steps = list(steps)
        if steps and source.due(saving["step"], "remove"):
            leaving = folder / f"{names.name(steps[0])}{names.LEAVING}"
            (folder / names.name(steps[0])).rename(leaving)
            next(leaving.iterdir()).unlink()
            source.dies(saving["step"], "remove")
        remove(folder, steps)

    def loaded(self: RunCheckpoints, opened: Any, *args: Any, **kwargs: Any) -> Any:
        source.dies(opened.step, "load")
        return keeper_load(self, opened, *args, **kwargs)

    write, remove, keeper_load = hashed._Hashed.write, names.remove, RunCheckpoints.load
    Checkpoints.save = saved  # type: ignore[method-assign]
    RunCheckpoints.load = loaded  # type: ignore[method-assign]
    hashed._Hashed.write = half  # type: ignore[method-assign]
    names.remove = half_removed  # type: ignore[assignment]
    at("copy", Checkpoints, "_copied", behind=True)
    at("verify", hashed.HashedFiles, "verified")
    at("manifest", manifest, "write")
    at("rename", names, "finish")
    at("named", names, "finish", behind=True)


def _rank() -> int:
    return int(os.environ["RANK"])


def _life() -> str:
    """One start of the ranks: of this job, its n-th."""
    return f"{os.environ.get('SURVIVAL_JOB', '0')}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
