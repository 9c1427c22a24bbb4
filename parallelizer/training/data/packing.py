"""Joins documents to one sequence of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from parallelizer.training.data.tokenizer import BYTES, Tokenizer, encode

AT_ONCE = 1000
"""Documents that a tokenizer is given at a time."""


def pack(documents: Iterable[bytes], tokenizer: Tokenizer = BYTES) -> Tensor:
    """The documents one after another, each followed by a separator: [n], uint8 for bytes, int32 for a tokenizer's.

    It stays as narrow as that because ranks forked from this process share it; `windows` widens what it takes out.
    """
    if tokenizer is BYTES:
        packed = bytearray()
        for document in documents:
            packed += document
            packed.append(BYTES.separator)
        return encode(packed)
    end = torch.tensor([tokenizer.separator], dtype=torch.int32)
    rest, parts = iter(documents), []
    while some := list(itertools.islice(rest, AT_ONCE)):
        parts += [part for tokens in tokenizer.encode(some) for part in (tokens, end)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
