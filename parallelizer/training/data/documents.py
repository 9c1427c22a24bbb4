"""Packed documents: the document of each token in a row.

A row is a window of the text, as without documents. In addition each token has the number of its document,
and its position in it. A document that began in an earlier row counts as a new one in this row, from position
0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallelizer.losses import IGNORED

DOCUMENTS = ("document_ids", "position_ids")
"""The entries that tell documents apart."""


def told_apart(batch: dict[str, Tensor], separator: int) -> dict[str, Tensor]:
    """`input_ids` and `labels` [rows, S] with `document_ids`, counted from 0 in each row, and `position_ids`, counted from 0 in
    each document: int64 [rows, S].

    A separator is the last token of its document. Its label, the first token of the next one, which nothing told, is
    ignored.
    """
    tokens = batch["input_ids"]
    ends = tokens == separator
    numbers = ends.cumsum(1) - ends.long()
    at = torch.arange(tokens.shape[1]).expand_as(tokens)
    first = torch.ones_like(ends)
    first[:, 1:] = ends[:, :-1]
    places = at - torch.where(first, at, 0).cummax(1).values
    labels = batch["labels"].masked_fill(ends, IGNORED)
    return {**batch, "labels": labels, "document_ids": numbers, "position_ids": places}
