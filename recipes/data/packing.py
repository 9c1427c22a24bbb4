"""Documents to one run of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from recipes.data.tokenizer import SEPARATOR, encode


def pack(documents: Iterable[bytes]) -> Tensor:
    """The documents one after another, each followed by a separator: uint8 [n], one byte a token.

    It stays uint8 because ranks forked from this process share it; `loader` widens what it takes out.
    """
    packed = bytearray()
    for document in documents:
        packed += document
        packed.append(SEPARATOR)
    return encode(packed)
