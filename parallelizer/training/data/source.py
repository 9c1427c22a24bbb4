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
    """A loss that a model reaches without having learnt anything worth it, and what it is, in nats by `unit`."""

    loss: float
    name: str
    unit: str


class Source(ABC):
    """Batches as a function of the seed and of how many samples came before.

    It is built once, before the ranks are forked. A sample is a row of a batch. Its number alone, counted from 0
    through the whole run, decides what it is: a run may go on with batches of another size, and sees no sample
    twice and misses none.
    """

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
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        """The `rows` of the global batch that `position` samples came before: its entries by name."""

    @abstractmethod
    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        """The `rows` of at most `count` batches of what is kept from training, always the same ones; never empty."""

    @abstractmethod
    def fingerprint(self) -> str:
        """The SHA-256 of what determines the batches beside seed, length and position: see `fingerprint` below.

        Two sources that give the same one are taken for the same data when a run is resumed.
        """

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The files that were read. Whoever reads some with `read_document` has their records to give."""
        return ()


def fingerprint(*parts: str | int | float | Tensor) -> str:
    """The SHA-256, in hexadecimal, of the parts in their order; of tensors the dtype, the shape and the bytes count.

    Each part is written with its kind and its length before it, so that no two lists of parts are the same bytes.
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
