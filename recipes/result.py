"""What a run comes to."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.data.source import Baseline


@dataclass(frozen=True)
class Result:
    """What a run comes to: the loss of each step and the held-out one, in nats a token (or image), and what that is
    compared with. `first` steps were there before; what follows them is told.
    """

    losses: tuple[float, ...]
    validation_loss: float
    baseline: Baseline
    seconds: float
    first: int = 0
