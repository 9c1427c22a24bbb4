"""The rows of docs/examples/task.py as data of the recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from parallelizer.training.data.source import ALL, Baseline, Source

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
sys.path.append(str(EXAMPLES))  # where the loops find it too: each is a script of that folder
import task  # noqa: E402


class Rows(Source):
    """Batches of those rows; with `shifts` as transformers has them, whose last token of a row has no label."""

    unit: ClassVar[str] = "tokens"

    def __init__(self, shifts: bool) -> None:
        self.shifts = shifts

    @property
    def baseline(self) -> Baseline:
        return Baseline(5.5, "nothing", "nats a token")

    def check_fits(self, seq_len: int) -> None:
        assert seq_len == task.TOKENS

    def units(self, seq_len: int) -> int:
        return seq_len

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        every = [task.row(position + number) for number in range(batch_size)[rows]]
        batch = {name: torch.stack([row[name] for row in every]) for name in every[0]}
        if self.shifts:
            batch["labels"][:, -1] = -100
        return batch

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        return [self.training_batch(0, batch_size=batch_size, seq_len=seq_len, seed=0, rows=rows)]

    def fingerprint(self) -> str:
        return "task"


def load(path: str, **_: object) -> Rows:
    """In place of `parallelizer.training.data.text.load`: `path` says who shifts labels."""
    return Rows(path == "transformers")
