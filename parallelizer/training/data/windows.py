"""Batches as a function of the seed and of the number of samples before them.

They have no state, so a resumed run sees the same batches. A text of n tokens has (n - 1) // S windows of S
tokens and their S successors, one after the other.
"""

from __future__ import annotations

from collections.abc import Sized
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.losses import IGNORED
from parallelizer.training.data.source import ALL


class Tokens(Sized, Protocol):
    """Tokens [n] of an integer type: a tensor, or what reads them where they are indexed."""

    def __getitem__(self, places: Tensor, /) -> Tensor: ...


def global_batch(
    tokens: Tokens, *, position: int, batch_size: int, seq_len: int, seed: int, rows: slice = ALL
) -> dict[str, Tensor]:
    """The `rows` of the batch after `position` samples: `input_ids` and `labels`, the next tokens, int64 [rows, S].

    Samples follow each other through one random order of all windows after another: within an epoch no window
    comes twice, and an epoch may end in the middle of a batch. PlanError if there is no window.
    """
    n_windows = window_count(tokens, seq_len)
    chosen = []
    for row in range(batch_size)[rows]:
        epoch, place = divmod(position + row, n_windows)
        chosen.append(int(window_order(n_windows, seed, epoch)[place]))
    return windows(tokens, torch.tensor(chosen, dtype=torch.int64), seq_len)


def evaluation_batches(
    tokens: Tokens, *, batch_size: int, seq_len: int, count: int, rows: slice = ALL
) -> list[dict[str, Tensor]]:
    """At most `count` batches of windows spread evenly over `tokens`, always the same ones; never empty.

    Every batch has `batch_size` rows before `rows` is taken. Where the windows run out, rows are
    filled with the first window under labels of -100, which count for nothing.
    """
    n_windows = window_count(tokens, seq_len)
    total = min(count * batch_size, n_windows)
    chosen = torch.arange(total) * n_windows // total
    batches = []
    for start in range(0, total, batch_size):
        here = chosen[start : start + batch_size]
        padded = torch.cat([here, torch.zeros(batch_size - len(here), dtype=torch.int64)])
        batch = windows(tokens, padded, seq_len)
        batch["labels"][len(here) :] = IGNORED
        batches.append({name: tensor[rows] for name, tensor in batch.items()})
    return batches


def windows(tokens: Tokens, chosen: Tensor, seq_len: int) -> dict[str, Tensor]:
    """The windows numbered by `chosen` int64 [n]: `input_ids` and `labels`, int64 [n, S]."""
    places = chosen[:, None] * seq_len + torch.arange(seq_len + 1)
    taken = tokens[places].long()
    return {"input_ids": taken[:, :-1].contiguous(), "labels": taken[:, 1:].contiguous()}


def window_count(tokens: Sized, seq_len: int, name: str = "text") -> int:
    """How many windows `tokens` has. PlanError `data-too-short` if none."""
    n_windows = (len(tokens) - 1) // seq_len
    if n_windows < 1:
        message = f"the {name} has {len(tokens)} tokens; one sequence needs {seq_len + 1}"
        help = "give more text, or a shorter train.seq_len"
        raise PlanError([Diagnostic("data-too-short", message, help=help)])
    return n_windows


@lru_cache(maxsize=2)  # a batch lies in one epoch, or across two
def window_order(n_windows: int, seed: int, epoch: int) -> Tensor:
    """All windows, int64 [n_windows], in an order that depends on the three arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    # One draw from the seed's own stream per epoch keeps (seed, epoch) and (seed + 1, epoch - 1) apart.
    epoch_seed = torch.randint(2**62, (epoch + 1,), generator=generator)[-1]
    return torch.randperm(n_windows, generator=generator.manual_seed(int(epoch_seed)))


def order_probe() -> Tensor:
    """A small order: another release of torch that draws others from the same seed is told by it."""
    return window_order.__wrapped__(64, 0, 0)
