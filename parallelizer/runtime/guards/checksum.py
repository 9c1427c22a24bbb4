"""A 64-bit checksum of the bytes of a tensor, computed on the tensor's device without a host read.

Every eight bytes are a word. A word is mixed with a key of its position and multiplied by an odd weight of
its position. The products are summed modulo 2^64. Both steps are bijections of the word, so one changed word
always changes the sum. Changes of several words cancel by chance once in billions, or by intent. (The mixing
is that of splitmix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.)
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

BLOCKS = {"cpu": 2**16}
"""By kind of device: the words that are mixed at a time. Small enough for a CPU's cache."""
BLOCK = 2**20
"""On other devices: large enough that the time of a kernel is not that of its launch."""

_FIRST, _SECOND = (
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB, signed
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
_LOW = 0xFFFFFFFF


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of a plain tensor's bytes in the order of its elements, int64 []; 0 for an empty one. Other kinds of
    devices give other checksums of the same bytes.
    """
    words = _words(tensor.detach())
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    keys, weights = _keys(tensor.device)
    for block in words.split(len(keys)):
        mixed = block ^ keys[: len(block)]
        mixed.mul_(_FIRST)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW))
        mixed.mul_(weights[: len(block)])
        # The sums of blocks count by their place too.
        total = (total * _SECOND) + mixed.sum()
    return total


def digest(value: object) -> int:
    """62 bits for what `repr` says of a value, the same on every rank, so that its opposite is a number of 64 bits too."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 2


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as int64 [n], filled up with zeros behind the last."""
    flat = tensor.contiguous().view(-1)
    if not len(flat):
        return flat.new_empty(0, dtype=torch.int64)
    count = flat.view(torch.uint8)
    missing = -len(count) % 8
    if missing or flat.storage_offset() * flat.element_size() % 8:
        count = torch.cat([count, count.new_zeros(missing)])
    return count.view(torch.int64)


@lru_cache(maxsize=4)
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and odd weights of the places in a block, the same on every rank and device."""
    size = BLOCKS.get(device.type, BLOCK)
    place = torch.arange(1, size + 1, dtype=torch.int64)
    keys, weights = (_splitmix(place + start) for start in (0, size))
    return keys.to(device), (weights | 1).to(device)


def _splitmix(state: torch.Tensor) -> torch.Tensor:
    mixed = state * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return mixed ^ ((mixed >> 31) & (2**33 - 1))
