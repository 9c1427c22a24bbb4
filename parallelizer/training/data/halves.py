"""Text for an encoder and a decoder: of two sequences that follow each other, the first is read and the second written."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from parallelizer.training.data import stdlib
from parallelizer.training.data.corpus import Data
from parallelizer.training.data.source import ALL


@dataclass(frozen=True)
class Halves(Data):
    """Batches of `input_ids`, `decoder_input_ids` and `labels`, int64 [rows, S] each.

    The decoder is given the last token that the encoder read and those that it has written; `labels` are the next ones.
    """

    kind: ClassVar[str] = "halves"

    def check_fits(self, seq_len: int) -> None:
        super().check_fits(2 * seq_len)

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        return halved(
            super().training_batch(position, batch_size=batch_size, seq_len=2 * seq_len, seed=seed, rows=rows)
        )

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        batches = super().heldout_batches(batch_size=batch_size, seq_len=2 * seq_len, count=count, rows=rows)
        return list(map(halved, batches))


def halved(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`input_ids` and `labels`, the next tokens, [rows, 2S] each, as what is read and what is written."""
    half = batch["input_ids"].shape[1] // 2
    written = slice(half - 1, 2 * half - 1)  # begins where the last token that was read is given
    return {
        "input_ids": batch["input_ids"][:, :half].contiguous(),
        "decoder_input_ids": batch["input_ids"][:, written].contiguous(),
        "labels": batch["labels"][:, written].contiguous(),
    }


def load(*, max_bytes: int, heldout: float, path: str | None = None) -> Halves:
    """The text of `stdlib.load`, in halves. PlanError as there."""
    data = stdlib.load(max_bytes=max_bytes, heldout=heldout, path=path)
    return Halves(**{field.name: getattr(data, field.name) for field in fields(data)})
