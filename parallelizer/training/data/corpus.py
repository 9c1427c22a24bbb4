"""The common form of all text sources: tokens for training, tokens held out, and a loss to compare with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.data import windows
from parallelizer.training.data.documents import told_apart
from parallelizer.training.data.files import FileRecord
from parallelizer.training.data.source import ALL, Baseline, Source, fingerprint
from parallelizer.training.data.tokenizer import BYTES, Tokenizer


@dataclass(frozen=True)
class Data(Source):
    """A text. `train` and `heldout` are tokens [n] of an integer type below `vocab_size`; they share no text.

    `unigram_entropy` is that of the held-out tokens, in nats per token, each a `token_unit`; `files` are those that the
    text and its tokenizer were read from. `separator` ends each document; with `documents` batches tell documents apart.
    """

    kind: ClassVar[str] = "text"
    """How batches are made of the tokens: another kind has another fingerprint."""

    train: Tensor
    heldout: Tensor
    vocab_size: int
    unigram_entropy: float
    files: tuple[FileRecord, ...] = ()
    token_unit: str = BYTES.unit
    separator: int = BYTES.separator
    documents: bool = False

    @property
    def baseline(self) -> Baseline:
        return Baseline(self.unigram_entropy, "the unigram entropy of that text", f"nats a {self.token_unit}")

    def check_fits(self, seq_len: int) -> None:
        windows.window_count(self.train, seq_len, "training text")
        windows.window_count(self.heldout, seq_len, "held-out text")

    def units(self, seq_len: int) -> int:
        return seq_len

    def training_batch(
        self, position: int, *, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
    ) -> dict[str, Tensor]:
        batch = windows.global_batch(
            self.train, position=position, batch_size=batch_size, seq_len=seq_len, seed=seed, rows=rows
        )
        return self._told_apart(batch)

    def heldout_batches(
        self, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
    ) -> list[dict[str, Tensor]]:
        batches = windows.evaluation_batches(
            self.heldout, batch_size=batch_size, seq_len=seq_len, count=count, rows=rows
        )
        return list(map(self._told_apart, batches))

    def _told_apart(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return told_apart(batch, self.separator) if self.documents else batch

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        apart = ("documents", self.separator) if self.documents else ()
        return fingerprint(self.kind, windows.order_probe(), self.train, self.heldout, *apart)


def build_data(config: DictConfig) -> Source:
    """Calls the configuration's `_target_` with its other keys. PlanError when it cannot give any data."""
    # Full keys, which begin with `data.` when the configuration is a part of a larger one.
    missing = sorted(key.removeprefix("data.") for key in OmegaConf.missing_keys(config))
    if missing:
        raise PlanError(
            Diagnostic(
                "data-not-found", f"data.{key} is not given", help=f"add data.{key}=... to the command"
            )
            for key in missing
        )
    try:
        data = instantiate(config)
    except InstantiationException as error:
        if isinstance(error.__cause__, PlanError):
            raise error.__cause__ from None
        raise unbuildable(str(error.__cause__ or error).splitlines()[0]) from error
    if not isinstance(data, Source):
        raise unbuildable(f"data._target_ gives {type(data).__name__}")
    return data


def unbuildable(reason: str) -> PlanError:
    """What is raised for a `_target_` that does not exist, refuses its arguments, or gives something else."""
    help = "data._target_ names a function that returns a parallelizer.training.Source; the other keys are its arguments"
    return PlanError([Diagnostic("data-unreadable", f"the data cannot be built: {reason}", help=help)])


def build(
    train: Tensor,
    heldout: Tensor,
    source: str,
    files: Iterable[FileRecord] = (),
    tokenizer: Tokenizer = BYTES,
    *,
    documents: bool = False,
) -> Data:
    """The two parts of `source`, read from `files`, as Data. PlanError if one has nothing to predict."""
    for name, tokens in (("training", train), ("held-out", heldout)):
        if len(tokens) < 2:
            message = f"the {name} part of {source} has {len(tokens)} tokens"
            help = "give more text, or another held-out share with data.heldout"
            raise PlanError([Diagnostic("data-too-short", message, help=help)])
    return Data(
        train,
        heldout,
        tokenizer.vocab_size,
        unigram_entropy(heldout),
        tuple(sorted({*files, *tokenizer.files})),
        tokenizer.unit,
        tokenizer.separator,
        documents,
    )


def unigram_entropy(tokens: Tensor) -> float:
    """The entropy, in nats, of how often each token occurs in `tokens` [n]; n > 0.

    It is the lowest loss on these tokens that a model can have which knows nothing of their context, even one
    fitted to them; a held-out loss below it shows that context is used.
    """
    counts = torch.bincount(tokens)
    shares = counts[counts > 0].double() / len(tokens)
    return float(-(shares * shares.log()).sum())


def stable_hash(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone: the same in every process, on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48
