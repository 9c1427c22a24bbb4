"""The interface of data sources: text, images, or a user's own class."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from parallelizer.training.data.files import FileRecord

ALL = slice(None)


@dataclass(frozen=True)
class Baseline:
    """A loss that a model reaches without learning more than frequencies, and its name, in nats per `unit`."""

    loss: float
    name: str
    unit: str


class Source(ABC):
    """Batches as a function of the seed and of the number of samples before them.

    It is built once, before the ranks are forked. A sample is a row of a batch, and is determined by its
    number alone, counted from 0 over the whole run. So a run can be resumed with another batch size, and
    uses each sample exactly once.
    """

    unit: ClassVar[str] = "tokens"
    """What the loss is a mean over."""

    @property
    @abstractmethod
    def baseline(self) -> Baseline:
        """The loss that a held-out loss is compared with."""

    @abstractmethod
    def check_fits(self, seq_len: int) -> None:
        """Raises PlanError unless there is a batch of sequences of `seq_len`."""

    @abstractmethod
    def units(self, seq_len: int) -> int:
        """The number of `unit`s in a row of a batch."""

    @abstractmethod
    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        """The `rows` of the global batch after `position` samples: its entries by name."""

    @abstractmethod
    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        """The `rows` of at most `count` batches that are not trained on: always the same ones, and never
        empty.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """The SHA-256 of everything that determines the batches, except seed, length and position: see
        `fingerprint` below. When a run is resumed, two sources with equal fingerprints are the same
        data.
        """

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The files that were read: the records that `read_document` returned."""
        return ()


def fingerprint(*parts: str | int | float | Tensor) -> str:
    """The SHA-256, in hexadecimal, of the parts in their order. Of tensors it covers the dtype, the shape
    and the bytes.

    Each part is preceded by its kind and its length, so that different lists of parts have different bytes.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            content = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            kind = f"{part.dtype} {list(part.shape)}"
        else:
            content, kind = repr(part).encode(), type(part).__name__
        digest.update(f"{kind} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
