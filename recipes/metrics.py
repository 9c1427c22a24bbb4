"""What a run measures, one JSON object a line, so that a run can be read while it goes."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType


class MetricsWriter:
    """Appends to `path`, whose folder must exist. Others can read a line once `write` has returned.

    Floats are written so that they read back to the same bits; those that are not finite as Python's `json`
    writes them: NaN, Infinity.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(
        self, *, step: int, loss: float, grad_norm: float, tokens_per_second: float, **more: float
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
