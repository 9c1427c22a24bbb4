"""The nearest names to a misspelt one, and the sentence that proposes them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def nearest(text: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """At most `n` of `candidates` that `text` may be a misspelling of, nearest first; none if none is near.

    Near is one edit (a character too many, too few, another, or two neighbours swapped), two from 5
    characters on, three from 10 on. Case counts for nothing; names with nothing in common are never near.
    After those come candidates that begin with `text`, if it has 3 characters or more, and abbreviations: `lr` and
    `learning_rate` find each other, because one consists of the first letters of the other's words.
    """
    wanted = text.lower()
    limit = min(3, 1 + len(wanted) // 5)
    found: list[tuple[int, str]] = []
    for candidate in dict.fromkeys(candidates):
        name = candidate.lower()
        distance = _distance(wanted, name, limit)
        if distance <= limit and distance < max(len(wanted), len(name), 1):
            found.append((distance, candidate))
        elif (len(wanted) >= 3 and name.startswith(wanted)) or _shortened(wanted, name):
            found.append((limit + 1, candidate))
    found.sort(key=lambda pair: pair[0])
    # Beside a name that differs only in case no other is meant; beside one a letter off, none three off.
    farthest = found[0][0] + (found[0][0] > 0) if found else 0
    return [candidate for distance, candidate in found if distance <= farthest][:n]


def _shortened(a: str, b: str) -> bool:
    """Whether one of two names has the first letters of the other's words, two at least."""
    words = [re.split("[_-]", name) for name in (a, b)]
    return any(
        len(some) > 1 and all(some) and "".join(w[0] for w in some) == short
        for some, short in zip(words, (b, a), strict=True)
    )


def did_you_mean(text: str, known: Iterable[str], what: str) -> str:
    """Help for an unknown name: the nearest of `known`, if one is near, and behind `what` all of them."""
    names = list(known)
    near = nearest(text, names, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"{what} {', '.join(names) or 'none'}"


def _distance(a: str, b: str, limit: int) -> int:
    """Edits between two words, a swap of neighbours being one; `limit + 1` if they are more than `limit`."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i, char in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (char != other))
            if i > 1 and j > 1 and char == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
        before, above = above, row
    return min(above[-1], limit + 1)
