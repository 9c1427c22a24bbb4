"""A data source of your own: token ids in a file, which is mapped into memory and may be larger than it. Copy and change it.

A configuration names its function; the other keys are the arguments:

    # conf/data/tokens.yaml
    _target_: recipes.own_data.load
    path: tokens.bin
    vocabulary: 256

    python -m recipes.train data=tokens
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch

import parallelizer as pz
from parallelizer import training


class TokenFile(training.Source):
    """Rows of a file of token ids, each drawn from a place of its own.

    A row is a sample. What a sample is depends on its number and the seed alone, and the source remembers nothing: a run
    that goes on from a checkpoint sees the next samples, with another batch size and on another mesh too.
    """

    def __init__(self, path: str, vocabulary: int, dtype: str, heldout: float) -> None:
        self.path, self.vocabulary, self.dtype = path, vocabulary, dtype
        self.tokens = os.path.getsize(path) // np.dtype(dtype).itemsize
        self.trained = round((1 - heldout) * self.tokens)  # the tokens behind them are held out

    @property
    def baseline(self) -> training.Baseline:
        """What the held-out loss is compared with when a run ends."""
        return training.Baseline(math.log(self.vocabulary), "that of equally likely tokens", "nats a token")

    def check_fits(self, seq_len: int) -> None:
        """Raises PlanError where a part of the file has no room for a sequence and the token behind it."""
        if min(self.trained, self.tokens - self.trained) <= seq_len:
            message = f"{self.path} is too short for sequences of {seq_len} tokens"
            raise pz.PlanError(
                [pz.Diagnostic("data-too-short", message, help="give more, or set train.seq_len")]
            )

    def units(self, seq_len: int) -> int:
        """The tokens of a row."""
        return seq_len

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = slice(None)
    ) -> dict[str, torch.Tensor]:
        """The `rows`, this rank's, of the global batch that `position` samples came before."""
        samples = [position + row for row in range(batch_size)[rows]]
        return self._read([self._place(sample, seed, self.trained - seq_len) for sample in samples], seq_len)

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = slice(None)
    ) -> list[dict[str, torch.Tensor]]:
        """The same rows of the rest of the file at each evaluation."""
        room = self.tokens - self.trained - seq_len
        samples = [range(number * batch_size, (number + 1) * batch_size)[rows] for number in range(count)]
        return [
            self._read([self.trained + self._place(s, 0, room) for s in some], seq_len) for some in samples
        ]

    def fingerprint(self) -> str:
        """What a checkpoint remembers of the data: a run goes on with data of the same fingerprint only."""
        return training.fingerprint(
            "TokenFile", os.path.basename(self.path), self.dtype, self.tokens, self.trained
        )

    def _place(self, sample: int, seed: int, room: int) -> int:
        """Where a sample begins, below `room`."""
        return int(np.random.default_rng((seed, sample)).integers(room))

    def _read(self, places: list[int], seq_len: int) -> dict[str, torch.Tensor]:
        """The entries of a batch: tokens and, as labels, those that follow, int64 [rows, seq_len] each."""
        file = np.memmap(self.path, self.dtype, mode="r")  # here, so that it is not copied into each rank
        rows = torch.from_numpy(np.stack([file[p : p + seq_len + 1] for p in places]).astype(np.int64))
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def load(*, path: str, vocabulary: int, dtype: str = "uint16", heldout: float = 0.05) -> TokenFile:
    """What the configuration calls."""
    return TokenFile(path, vocabulary, dtype, heldout)
