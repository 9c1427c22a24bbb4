"""Passes the measurements of a run to TensorBoard and Weights & Biases; `metrics.jsonl` is always written.

A tracker is a class with three methods and an entry in TRACKERS. If a tracker fails in a run, the run warns,
omits it from then on, and continues.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, Span


class Tracker(Protocol):
    """Receives rank 0's measurements. An exception in a method ends the tracker, not the run."""

    def open(self, config: Mapping[str, Any], folder: Path, done: int) -> None:
        """Start in a run's output folder. `done` steps were taken before and are not written again; what
        was written of later steps is discarded or overwritten. `config` is the resolved configuration of
        the run.
        """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The measurements of a step, from 1: the keys of a line of `metrics.jsonl` without `step` and
        `experts`. Of a mixture also `experts_busiest/MODULE`, `experts_rows/expert_NUMBER` and `experts_rows/rank_NUMBER`.
        """

    def close(self, status: str) -> None:
        """End with `finished`, `stopped` (the run may be resumed) or `failed`."""


class TensorBoard:
    """Event files in `<output folder>/tensorboard`. A run that goes on writes another, which tells TensorBoard to leave
    out what the others have behind the step where it begins.
    """

    package = "tensorboard"

    def open(self, config: Mapping[str, Any], folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        again = place.is_dir()
        self._writer = SummaryWriter(str(place), purge_step=done + 1 if again else None)
        if not again:
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # it is there when the run is killed

    def close(self, status: str) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases. Its id and the last step that it was given stand in `<output folder>/wandb.json`, by which
    a run that goes on goes on there too. WANDB_PROJECT, WANDB_MODE and the other variables mean what they mean.
    """

    package = "wandb"

    def open(self, config: Mapping[str, Any], folder: Path, done: int) -> None:
        import wandb

        self._known = folder / "wandb.json"
        known: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            known = json.loads(self._known.read_text(encoding="utf-8"))
        self._run = wandb.init(
            id=known.get("id"),
            resume="allow" if known else None,
            project=os.environ.get("WANDB_PROJECT") or "parallelizer",
            name=os.environ.get("WANDB_NAME") or "/".join(folder.absolute().parts[-2:]),
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # The service keeps what it was given, also of a rank that was killed; and a step can be given once.
        self._last = int(known.get("step", 0))
        self._note(self._last)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last:
            self._run.log(dict(values), step=step)
            self._note(step)

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))

    def _note(self, step: int) -> None:
        unfinished = self._known.with_name("wandb.json.tmp")
        unfinished.write_text(json.dumps({"id": self._run.id, "step": step}) + "\n", encoding="utf-8")
        unfinished.replace(self._known)
        self._last = step


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
"""By the names that `train.trackers` takes. A module that the configuration's `imports` names may add its own."""


def missing(names: Sequence[str], span: Span | None) -> list[Diagnostic]:
    """Those trackers whose `package`, if they name one, is not installed here."""
    return [
        Diagnostic(
            "tracker-missing",
            f"train.trackers has {name}, and the package {name} is not installed",
            span,
            f"pip install {name}, or leave it out",
        )
        for name in names
        if (package := getattr(TRACKERS[name], "package", None)) and importlib.util.find_spec(package) is None
    ]


@dataclass
class Trackers:
    """Those of one run, as a context."""

    names: Sequence[str]
    config: Mapping[str, Any]
    folder: Path
    done: int
    status: str = "finished"
    """What `close` is told, unless an exception ends the run."""

    def __enter__(self) -> Trackers:
        self._open: dict[str, Tracker] = {name: TRACKERS[name]() for name in self.names}
        self._each(lambda tracker: tracker.open(self.config, self.folder, self.done))
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand a step on to all."""
        self._each(lambda tracker: tracker.write(step, values))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda tracker: tracker.close("failed" if error is not None else self.status))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                call(tracker)
            except (Exception, SystemExit) as error:
                del self._open[name]
                show_diagnostics.write([failed(name, error)], sys.stderr, summary=False)


def failed(name: str, error: BaseException) -> Diagnostic:
    """What is said of a tracker that has raised something."""
    reason = next(iter(str(error).strip().splitlines()), "")
    message = f"{name} failed and is not used from here on: {type(error).__name__}: {reason}"
    help_text = "the run continues; metrics.jsonl contains every step"
    return Diagnostic("tracker-failed", message, None, help_text, severity="warning")
