"""Text to tokens and back: one token for each byte, or a tokenizer of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from parallelizer.training.data.files import FileRecord

VOCAB_SIZE = 256
SEPARATOR = 0
"""A byte that no text file holds."""

AUTO = "auto"
"""The choice of the tokenizer that a pretrained model comes with; bytes where it has none."""


class Tokenizer(ABC):
    """Its tokens lie below `vocab_size`; `separator` is the one that ends each document, `unit` what one token is called."""

    vocab_size: int
    separator: int
    unit: ClassVar[str] = "token"

    @abstractmethod
    def encode(self, documents: Sequence[bytes]) -> list[Tensor]:
        """The tokens of each document, [n] of an integer type, without a separator."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Their text; of what is no text, U+FFFD."""

    @abstractmethod
    def refuses(self, document: bytes) -> str | None:
        """Why a document is no text that this tokenizer takes, where it is none."""

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The files that it was read from."""
        return ()


class Bytes(Tokenizer):
    """256 tokens, of which 0 separates documents."""

    vocab_size, separator = VOCAB_SIZE, SEPARATOR
    unit: ClassVar[str] = "byte"

    def encode(self, documents: Sequence[bytes]) -> list[Tensor]:
        return [encode(document) for document in documents]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def refuses(self, document: bytes) -> str | None:
        return "it holds a zero byte, so it is no text" if SEPARATOR in document else None


BYTES = Bytes()


def encode(text: str | bytes | bytearray) -> Tensor:
    """The bytes of `text` (UTF-8) as uint8 [n]."""
    data = text.encode() if isinstance(text, str) else text
    # frombuffer wants a writable buffer, and at least one byte.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """The text of tokens [n] of any integer type; bytes that are not UTF-8 become U+FFFD."""
    return BYTES.decode(tokens.tolist())
