"""Token ids in a raw file, as nanoGPT's `prepare.py` writes them: mapped into memory, so that it may be larger than it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.data import windows
from parallelizer.training.data.source import ALL, Baseline, Source, fingerprint

DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")
PROBED = 1 << 16
"""So many tokens at each end of a file are looked at."""

HELP = "data.path is a file of token ids without a header, each of data.dtype: nanoGPT's train.bin, say"


class TokenFile(Source):
    """Windows of a file of token ids: one beside the other, in a random order of each epoch, as of a text.

    `trained` and `held` are (path, first token, number of tokens). Nothing is read before a batch is asked for.
    """

    def __init__(
        self, trained: tuple[str, int, int], held: tuple[str, int, int], dtype: str, vocabulary: int | None
    ) -> None:
        self.trained, self.held, self.dtype, self.vocabulary = trained, held, dtype, vocabulary
        self._ends = [self._probe(part) for part in (trained, held)]

    @property
    def vocab_size(self) -> int:
        """The ids are below it: `vocabulary`, or what the ends of the files tell."""
        return self.vocabulary or 1 + max(int(ends.max()) for ends in self._ends)

    @property
    def baseline(self) -> Baseline:
        counts = torch.bincount(self._ends[1])
        shares = counts[counts > 0].double() / counts.sum()
        entropy = float(-(shares * shares.log()).sum())
        return Baseline(entropy, "the unigram entropy of those tokens", "nats a token")

    def check_fits(self, seq_len: int) -> None:
        for part, name in ((self.trained, "training part"), (self.held, "held-out part")):
            windows.window_count(range(part[2]), seq_len, f"{name} of {part[0]}")

    def units(self, seq_len: int) -> int:
        return seq_len

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        return windows.global_batch(
            self._tokens(self.trained),
            position=position,
            batch_size=batch_size,
            seq_len=seq_len,
            seed=seed,
            rows=rows,
        )

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        return windows.evaluation_batches(
            self._tokens(self.held), batch_size=batch_size, seq_len=seq_len, count=count, rows=rows
        )

    def fingerprint(self) -> str:
        """Of the files' lengths and ends: to read all of a large file would take minutes."""
        parts = [name for part in (self.trained, self.held) for name in (Path(part[0]).name, *part[1:])]
        return fingerprint("token file", self.dtype, windows.order_probe(), *parts, *self._ends)

    def _tokens(self, part: tuple[str, int, int]) -> MappedTokens:
        return MappedTokens(*part, self.dtype)

    def _probe(self, part: tuple[str, int, int]) -> Tensor:
        tokens = self._tokens(part)
        at_end = torch.arange(max(0, len(tokens) - PROBED), len(tokens))
        ends = torch.cat([tokens[torch.arange(min(PROBED, len(tokens)))], tokens[at_end]])
        if len(ends) and int(ends.min()) < 0:
            raise _unreadable(part[0], f"it holds {int(ends.min())} where it is read as {self.dtype}")
        return ends


class MappedTokens:
    """Tokens [n] of a part of a file, read where they are indexed. The map is made anew each time, since a mapping that a
    rank inherits or pickles would be read as a whole.
    """

    def __init__(self, path: str, first: int, count: int, dtype: str) -> None:
        self.path, self.first, self.count, self.dtype = path, first, count, dtype

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: Tensor) -> Tensor:
        if not places.numel():
            return torch.empty(places.shape, dtype=torch.int64)
        file = np.memmap(self.path, self.dtype, mode="r")
        return torch.from_numpy(file[places.numpy() + self.first].astype(np.int64))


def load(
    *,
    path: str,
    heldout_path: str | None = None,
    heldout: float = 0.05,
    dtype: str = "uint16",
    vocabulary: int | None = None,
) -> TokenFile:
    """The tokens of `path`. Those of `heldout_path` are held out, or without it the last share `heldout`.

    PlanError: `data-not-found`, `data-unreadable`, `data-too-short`.
    """
    if dtype not in DTYPES:
        raise _unreadable(path, f"data.dtype is {dtype}, and token ids are {', '.join(DTYPES)}")
    total = _count(path, dtype)
    if heldout_path is not None:
        return TokenFile((path, 0, total), (heldout_path, 0, _count(heldout_path, dtype)), dtype, vocabulary)
    cut = total - round(heldout * total)
    if not 0 < cut < total:
        message = f"{path} has {total} tokens, of which data.heldout={heldout} leaves a part without any"
        raise PlanError([Diagnostic("data-too-short", message, help="set data.heldout, or give more tokens")])
    return TokenFile((path, 0, cut), (path, cut, total - cut), dtype, vocabulary)


def _count(path: str, dtype: str) -> int:
    try:
        size = os.path.getsize(path)
    except OSError:
        message = f"data.path '{path}' does not exist"
        raise PlanError([Diagnostic("data-not-found", message, help=HELP)]) from None
    count, rest = divmod(size, np.dtype(dtype).itemsize)
    if rest or not os.path.isfile(path):
        raise _unreadable(path, f"its {size} bytes are not a multiple of {dtype}")
    return count


def _unreadable(path: str, reason: str) -> PlanError:
    return PlanError([Diagnostic("data-unreadable", f"{path} cannot be read: {reason}", help=HELP)])
