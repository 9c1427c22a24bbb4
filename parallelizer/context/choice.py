"""What each way to do context-parallel attention sends, in closed form, and which sends least.

K are the bytes of one rank's keys and values, W the ranks, g the query heads to a key head. Queries, and results, are then
g/2 K. What is sent forward and backward together, by rank r:

    all-gather    (W-1)K + (W-1)K + (W-1)K    gathered twice; the gradients dealt out once
      kept        (W-1)K + (W-1)K             gathered once, with `keep_gathered` or under a mask
    ring          2(W-1)K + (W-1 - r/2)K      passed on twice; under a causal mask half of a gradient for r ranks
    ulysses       2 (W-1)/W (1+g) K           queries, keys and values there, the result back, and again backward
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from parallelizer.context.ulysses import fits

METHODS = ("all-gather", "ring", "ulysses")


class Heads(NamedTuple):
    """Heads of the queries, and of keys and values."""

    queries: int
    keys: int


def sent(
    method: str,
    heads: Heads,
    ranks: int,
    rank: int = 0,
    *,
    is_causal: bool,
    masked: bool = False,
    kept: bool = False,
) -> Fraction:
    """What a rank sends forward and backward, as a multiple of the bytes of its keys and values; heads of one size."""
    others = ranks - 1
    if method == "all-gather":
        return Fraction((2 if kept or masked else 3) * others)
    if method == "ring":
        return Fraction(3 * others) - (Fraction(rank, 2) if is_causal else 0)
    return Fraction(2 * others, ranks) * (1 + Fraction(heads.queries, heads.keys))


def cheapest(
    heads: Heads, ranks: int, *, is_causal: bool, masked: bool = False, keep_gathered: bool = False
) -> str:
    """The method whose busiest rank sends least; of equal ones the one that holds less at a time, so the ring before
    the gather. Raises nothing: the gather can do all.
    """
    legal = ["all-gather"]
    if not keep_gathered and not masked:  # under a mask the gather keeps what it has, and sends less
        legal.insert(0, "ring")
    if fits(*heads, ranks):
        legal.insert(0, "ulysses")
    return min(
        legal, key=lambda m: sent(m, heads, ranks, is_causal=is_causal, masked=masked, kept=keep_gathered)
    )
