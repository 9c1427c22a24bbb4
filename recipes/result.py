"""What a run comes to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What a run comes to: the loss of each step and the held-out one, in nats a token."""

    losses: tuple[float, ...]
    validation_loss: float
    unigram_entropy: float
    seconds: float
