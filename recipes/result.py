"""What a run comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.data.source import Baseline


@dataclass(frozen=True)
class Result:
    """What a run comes to: the loss of each step and the held-out one, in nats a token (or image), and what that is
    compared with. `first` steps were there before; what follows them is told.

    `stopped` is the signal that ended the run before its time, 0 for none, `checkpoint` the last one that was written, and
    `unwritten` how many could not be.
    """

    losses: tuple[float, ...]
    validation_loss: float | None
    baseline: Baseline
    seconds: float
    first: int = 0
    stopped: int = 0
    checkpoint: Path | None = None
    unwritten: int = 0
