"""Bytes as tokens: 256 values, of which 0 (found in no text file) separates documents."""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB_SIZE = 256
SEPARATOR = 0


def encode(text: str | bytes | bytearray) -> Tensor:
    """The bytes of `text` (UTF-8) as uint8 [n]."""
    data = text.encode() if isinstance(text, str) else text
    # frombuffer wants a writable buffer, and at least one byte.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """The text of tokens [n] of any integer type; bytes that are not UTF-8 become U+FFFD."""
    return bytes(tokens.tolist()).decode(errors="replace")
