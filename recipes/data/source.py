"""What a run takes its batches from: text, images, or whatever somebody's own class gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

ALL = slice(None)


@dataclass(frozen=True)
class Baseline:
    """A loss that a model reaches without having learnt anything worth it, and what it is, in nats by `unit`."""

    loss: float
    name: str
    unit: str


class Source(ABC):
    """Batches as a function of the seed and the step. Built once, before the ranks are forked."""

    unit: ClassVar[str] = "tokens"
    """What the loss is a mean over."""

    @property
    @abstractmethod
    def baseline(self) -> Baseline:
        """What a held-out loss is compared with."""

    @abstractmethod
    def check_fits(self, seq_len: int) -> None:
        """Raises PlanError unless there is a batch of sequences of `seq_len`."""

    @abstractmethod
    def units(self, seq_len: int) -> int:
        """How many `unit`s a row of a batch has."""

    @abstractmethod
    def training_batch(
        self, step: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        """The `rows` of the global batch of `step` (from 0): its entries by name."""

    @abstractmethod
    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        """The `rows` of at most `count` batches of what is kept from training, always the same ones; never empty."""
