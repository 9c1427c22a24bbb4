"""The measurements of a run, one JSON object a line, so that they can be read during the run."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsWriter:
    """Appends to `path`, whose folder must exist. Others can read a line once `write` has returned.

    A run that goes on behind `done` steps writes the later ones anew, and what stands there of them goes. With `done=None`
    the run begins: a file of another run that is there is kept as `metrics.1.jsonl`, or under the next free number.

    Floats are written so that they read back to the same bits; those that are not finite as Python's `json`
    writes them: NaN, Infinity.
    """

    def __init__(self, path: str | Path, *, done: int | None = None) -> None:
        if done is not None:
            _keep(Path(path), done)
        else:
            _put_aside(Path(path))
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(
        self, *, step: int, loss: float, grad_norm: float, tokens_per_second: float, **more: Any
    ) -> None:
        """Adds one line. TypeError, and nothing written, for a value that JSON has no form for."""
        values = {"step": step, "loss": loss, "grad_norm": grad_norm, "tokens_per_second": tokens_per_second}
        self._file.write(json.dumps(values | more) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _put_aside(path: Path) -> None:
    """Rename what another run has written, so that a file holds one run."""
    if path.is_file() and path.stat().st_size:
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def _keep(path: Path, done: int) -> None:
    """Only the lines of the first `done` steps. A line that was cut off is none."""
    if not path.is_file():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines(True) if _step(line) <= done]
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text("".join(kept), encoding="utf-8")
    unfinished.replace(path)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
