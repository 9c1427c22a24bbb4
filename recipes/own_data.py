"""A data source of your own: token ids in a memory-mapped file, which may be larger than memory. Copy and change it.

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
    """Rows of a file of token ids, each from a random place.

    A row is a sample. The place of a sample depends only on its number and the seed, and the source has no state: a run that
    resumes from a checkpoint reads the next samples, also with another batch size or on another mesh.
    """

    def __init__(self, path: str, vocabulary: int, dtype: str, heldout: float) -> None:
        self.path, self.vocabulary, self.dtype = path, vocabulary, dtype
        self.tokens = os.path.getsize(path) // np.dtype(dtype).itemsize
        self.trained = round((1 - heldout) * self.tokens)  # the tokens after these are held out

    @property
    def baseline(self) -> training.Baseline:
        """The loss that the held-out loss is compared with when a run ends."""
        return training.Baseline(math.log(self.vocabulary), "that of equally likely tokens", "nats a token")

    def check_fits(self, seq_len: int) -> None:
        """Raises PlanError if a part of the file is shorter than a sequence and the token after it."""
        if min(self.trained, self.tokens - self.trained) <= seq_len:
            message = f"{self.path} is too short for sequences of {seq_len} tokens"
            raise pz.PlanError(
                [pz.Diagnostic("data-too-short", message, help="give more, or set train.seq_len")]
            )

    def units(self, seq_len: int) -> int:
        """The number of tokens in a row."""
        return seq_len

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = slice(None)
    ) -> dict[str, torch.Tensor]:
        """This rank's `rows` of the global batch, which begins after `position` samples."""
        samples = [position + row for row in range(batch_size)[rows]]
        return self._read([self._place(sample, seed, self.trained - seq_len) for sample in samples], seq_len)

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = slice(None)
    ) -> list[dict[str, torch.Tensor]]:
        """Rows of the rest of the file, the same ones at each evaluation."""
        room = self.tokens - self.trained - seq_len
        samples = [range(number * batch_size, (number + 1) * batch_size)[rows] for number in range(count)]
        return [
            self._read([self.trained + self._place(s, 0, room) for s in some], seq_len) for some in samples
        ]

    def fingerprint(self) -> str:
        """A hash that checkpoints save. A run can only resume on data with the same fingerprint."""
        return training.fingerprint(
            "TokenFile", os.path.basename(self.path), self.dtype, self.tokens, self.trained
        )

    def _place(self, sample: int, seed: int, room: int) -> int:
        """The first token of a sample, less than `room`."""
        return int(np.random.default_rng((seed, sample)).integers(room))

    def _read(self, places: list[int], seq_len: int) -> dict[str, torch.Tensor]:
        """A batch: the tokens, and as labels the token after each, int64 [rows, seq_len] each."""
        file = np.memmap(self.path, self.dtype, mode="r")  # opened here: no rank gets a copy
        rows = torch.from_numpy(np.stack([file[p : p + seq_len + 1] for p in places]).astype(np.int64))
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def load(*, path: str, vocabulary: int, dtype: str = "uint16", heldout: float = 0.05) -> TokenFile:
    """Make the source; the configuration's `_target_`."""
    return TokenFile(path, vocabulary, dtype, heldout)
