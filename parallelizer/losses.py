"""Losses as sums and counts: a mean over the global batch is only known once every rank's count is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from parallelizer.styles.sharded_logits import cross_entropy as summed_cross_entropy

IGNORED = -100  # a label that counts for nothing, as in torch


def cross_entropy(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the token losses in nats (float32 scalar), and the number of those tokens (int64 scalar).

    `output` holds logits [B, S, vocab], plain or sharded over the vocabulary; `batch["labels"]` is int64 [B, S],
    with -100 where nothing is learnt. The sum is 0 where the count is 0.
    """
    labels = batch["labels"]
    return summed_cross_entropy(output, labels, ignore_index=IGNORED), (labels != IGNORED).sum()


def classification(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the losses of whole rows in nats (float32 scalar), and the number of rows (int64 scalar).

    `output` holds logits [B, classes], plain or sharded over the classes; `batch["labels"]` is int64 [B], with -100 where
    nothing is learnt.
    """
    labels = batch["labels"]
    return summed_cross_entropy(output, labels, ignore_index=IGNORED), (labels != IGNORED).sum()


def squared_error(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the squared differences of a model's features and those in `batch["labels"]`, a float of the same shape
    [B, ...], and how many numbers these are (int64 scalar). For models without a head, such as an encoder of images
    that learns the features of another one.
    """
    features, labels = features_of(output), batch["labels"]
    return (features - labels).square().sum(), labels.new_tensor(labels.numel()).long()


def features_of(output: Any) -> Tensor:
    """The features in a model's output: its `pooler_output`, else its `last_hidden_state`, else the output itself."""
    for name in ("pooler_output", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if not isinstance(output, Tensor):
        raise TypeError(f"a {type(output).__name__} has neither pooler_output nor last_hidden_state")
    return output
