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
    """The result of a run: the loss of each step and the held-out loss, in nats per token (or image), and
    the baseline that it is compared with. `first` steps were done before; the values are of the steps
    after them.

    `stopped` is the signal that ended the run early, or 0. `checkpoint` is the last one that was written,
    and `unwritten` the number of those that could not be. `rates` are tokens per second of each step,
    `tokens` the tokens in a step, both counted in `unit`. `skipped` is the number of steps that were not
    finite. `memory` is rank 0's at the end, `predicted` the dry run's peak, `profiled` the folder of
    traces. `nats` is whether the loss is a cross entropy, like the baseline.
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
    causal_mfu: float | None = None
    profiled: Path | None = None
    nats: bool = True

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the lowest loss, from 1, and that loss; None if no loss is finite."""
        finite = [
            (loss, step) for step, loss in enumerate(self.losses, self.first + 1) if math.isfinite(loss)
        ]
        if not finite:
            return None
        loss, step = min(finite)
        return step, loss

    @property
    def speed(self) -> tuple[float, float, float] | None:
        """Lower quartile, median and upper quartile of tokens per second. The first step is left out if
        there are others, because it includes one-time work.
        """
        rates = self.rates[1:] or self.rates
        if not rates:
            return None
        if len(rates) == 1:
            return rates[0], rates[0], rates[0]
        low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
        return low, middle, high
