"""A class from two that were traced, which differ in the ranks of ep alone.

Whatever ep is, the experts of a rank together get as many rows. They become fewer as ep grows, and the rows of each become more.
So every size of an operator, of a collective and of the memory is constant, or grows with ep, or is a constant and a part that
falls as 1/ep: what a rank sends of an all-to-all is such a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from parallelizer.propose.search.candidate import NO_CHECKPOINT, Candidate
from parallelizer.propose.search.class_trace import ClassTrace

NEARLY = 0.75
"""What grows at least by so much of the growth of ep is taken to grow with it: rows may be rounded. The part of an all-to-all
that a rank sends grows by less.
"""


class NotAlike(Exception):
    """Two traced classes differ in more than sizes."""


def between(
    wanted: Iterable[Candidate], known: Iterable[Candidate]
) -> dict[Candidate, tuple[Candidate, Candidate]]:
    """Which of the wanted classes have two others, wanted or known, that differ from them in ep alone: one with fewer ranks of it
    and one with more.
    """
    asked = {key for key in wanted if _crosses_data(key)}
    alike: dict[object, list[Candidate]] = {}
    for key in sorted({*asked, *filter(_crosses_data, known)}, key=lambda key: key.ep):
        but_ep = dataclasses.replace(key, ep=1, dp_shard=1), Fraction(key.shards, key.ep)
        alike.setdefault(but_ep, []).append(key)
    return {key: (keys[0], keys[-1]) for keys in alike.values() for key in keys[1:-1] if key in asked}


def _crosses_data(key: Candidate) -> bool:
    """Whether ep spans more than cp and tp, so that experts are sharded over axes of their own."""
    return key.checkpoint == NO_CHECKPOINT and key.ep > key.cp * key.tp


def with_other_ep(fewer: ClassTrace, more: ClassTrace, eps: tuple[int, int], ep: int) -> ClassTrace:
    """The class with `ep` ranks of ep, from those with `eps`, fewer and more. Raises NotAlike."""
    few, many = eps
    left = (Fraction(1, ep) - Fraction(1, many)) / (Fraction(1, few) - Fraction(1, many))

    def size(a: int, b: int) -> int:
        if b * few > NEARLY * a * many:
            return round(a + (b - a) * Fraction(ep - few, many - few))
        return round(b + (a - b) * left)

    def of(a: Any, b: Any) -> Any:
        if type(a) is not type(b):
            raise NotAlike
        if type(a) is int:
            return size(a, b)
        if dataclasses.is_dataclass(a) and not isinstance(a, type):
            fields = dataclasses.fields(a)
            return dataclasses.replace(
                a, **{f.name: of(getattr(a, f.name), getattr(b, f.name)) for f in fields}
            )
        if isinstance(a, Mapping) and a.keys() == b.keys():
            return {key: of(a[key], b[key]) for key in a}
        if isinstance(a, tuple) and len(a) == len(b):
            return tuple(map(of, a, b))
        if a != b:
            raise NotAlike
        return a

    made: ClassTrace = of(fewer, more)
    return made
