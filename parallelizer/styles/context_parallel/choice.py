"""What each way to do context-parallel attention sends, in closed form, and which sends least.

K are the bytes of one rank's keys and values, W the ranks, g the query heads to a key head. Queries, and results, are then
g/2 K. What is sent forward and backward together, by rank r:

    all-gather    (W-1)K + (W-1)K + (W-1)K    gathered twice; the gradients dealt out once
      kept        (W-1)K + (W-1)K             gathered once, with `keep_gathered` or under a mask
    ring          2(W-1)K + (W-1 - r/2)K      passed on twice; under a causal mask half of a gradient for r ranks
    ulysses       2 (W-1)/W (1+g) K           queries, keys and values there, the result back, and again backward
    ulysses-ring  2 (U-1)/U (1+g) K           ulysses among U ranks, whose heads then have as many bytes as their rows had,
                  + 3(R-1)K - r/U/2 K         and a ring of R = W/U ranks; r/U without its fraction, and only if causal

With U ranks the last is c + (3W - 2(1+g))/U K: least for the largest U if there are more than 2/3 (1+g) ranks, else for U = 1.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from parallelizer.styles.context_parallel.ulysses import fits

METHODS = ("all-gather", "ring", "ulysses", "ulysses-ring")


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
    degree: int | None = None,
) -> Fraction:
    """What a rank sends forward and backward, as a multiple of the bytes of its keys and values; heads of one size.

    `degree` is the U of ulysses-ring: if not given, `best_degree`.
    """
    if method == "ulysses-ring":
        inside = degree or best_degree(heads, ranks)
        return sent("ulysses", heads, inside, is_causal=is_causal) + sent(
            "ring", heads, ranks // inside, rank // inside, is_causal=is_causal
        )
    others = ranks - 1
    if method == "all-gather":
        return Fraction((2 if kept or masked else 3) * others)
    if method == "ring":
        return Fraction(3 * others) - (Fraction(rank, 2) if is_causal else 0)
    return Fraction(2 * others, ranks) * (1 + Fraction(heads.queries, heads.keys))


def degrees(heads: Heads, ranks: int) -> list[int]:
    """Over how many ranks ulysses-ring may deal out heads: 1 is the ring, all of them ulysses."""
    return [n for n in range(1, ranks + 1) if ranks % n == 0 and fits(*heads, n)]


def best_degree(heads: Heads, ranks: int) -> int:
    """The degree by which ulysses-ring sends least; of equal ones the largest, which takes fewest steps."""
    return min(
        degrees(heads, ranks),
        key=lambda n: (sent("ulysses-ring", heads, ranks, is_causal=True, degree=n), -n),
    )


def legal(
    heads: Heads, ranks: int, *, masked: bool = False, keep_gathered: bool = False, degree: int | None = None
) -> list[str]:
    """The methods that `auto` chooses from, of equal ones the first. Ulysses-ring is among them if it is a method of its
    own: neither with one rank to a row, nor with all.
    """
    found = ["all-gather"]
    if not masked and not keep_gathered:  # under a mask the gather keeps what it has, and sends less
        found.insert(0, "ring")
    inside = degree or best_degree(heads, ranks)
    if not masked and 1 < inside < ranks and inside in degrees(heads, ranks):
        found.insert(0, "ulysses-ring")
    if fits(*heads, ranks):
        found.insert(0, "ulysses")
    return found


def cheapest(
    heads: Heads,
    ranks: int,
    *,
    is_causal: bool,
    masked: bool = False,
    keep_gathered: bool = False,
    degree: int | None = None,
) -> str:
    """The method whose busiest rank sends least; of equal ones the one that holds less at a time, so the ring before
    the gather. `degree` is that of ulysses-ring, if it is not free. Raises nothing: the gather can do all.
    """
    return min(
        legal(heads, ranks, masked=masked, keep_gathered=keep_gathered, degree=degree),
        key=lambda m: sent(
            m, heads, ranks, is_causal=is_causal, masked=masked, kept=keep_gathered, degree=degree
        ),
    )
