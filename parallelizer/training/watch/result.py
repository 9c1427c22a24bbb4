"""The result of a run."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from parallelizer.training.data.source import Baseline
from parallelizer.training.watch.memory import Memory


@dataclass(frozen=True)
class Result:
    """What a run comes to: the loss of each step and the held-out one, in nats a token (or image), and what that is
    compared with. `first` steps were there before; what follows them is told.

    `stopped` is the signal that ended the run before its time, 0 for none, `checkpoint` the last one that was written, and
    `unwritten` how many could not be. `rates` are tokens a second of each step, of `tokens` in a step, or of what `unit`
    says; `skipped` the steps that were left out, not being finite; `memory` is rank 0's at the end, `predicted` the peak
    that the dry run says; `profiled` the folder of traces. `nats` says whether the loss is a cross entropy, as what it is
    compared with is.
    """

    losses: tuple[float, ...]
    validation_loss: float | None
    baseline: Baseline
    seconds: float
    first: int = 0
    stopped: int = 0
    checkpoint: Path | None = None
    unwritten: int = 0
    rates: tuple[float, ...] = ()
    tokens: int = 0
    unit: str = "tokens"
    skipped: int = 0
    memory: Memory | None = None
    predicted: int | None = None
    mfu: float | None = None
    profiled: Path | None = None
    nats: bool = True

    @property
    def best(self) -> tuple[int, float] | None:
        """The step of the lowest loss, from 1, and that loss; None where none is finite."""
        finite = [
            (loss, step) for step, loss in enumerate(self.losses, self.first + 1) if math.isfinite(loss)
        ]
        if not finite:
            return None
        loss, step = min(finite)
        return step, loss

    @property
    def speed(self) -> tuple[float, float, float] | None:
        """Lower quartile, median and upper quartile of tokens a second, without the first step where there are others:
        it makes what later ones find made.
        """
        rates = self.rates[1:] or self.rates
        if not rates:
            return None
        if len(rates) == 1:
            return rates[0], rates[0], rates[0]
        low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
        return low, middle, high
