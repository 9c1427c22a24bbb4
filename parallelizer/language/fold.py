"""The opposite of expanding: many module paths as few globs, as every table and message prints them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from parallelizer.language.glob import MAX_ALTERNATIVES, MAX_LENGTH, escape, split_path

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})", re.DOTALL)


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Few globs that match exactly `paths`: `["layers.{0..31}.attention.{wq,wk,wv}"]` for 96 modules.

    Equal siblings share braces; numbers become ranges, also at the end of a name (`layer{1..4}`). Every path
    is in exactly one of the globs. Globs and siblings come in order of first appearance, numbers ascending.
    Each glob parses, unless it is one path that is by itself longer than `MAX_LENGTH`.
    """
    return fold_alternatives(escape(path) for path in paths)


def fold_alternatives(patterns: Iterable[str]) -> list[str]:
    """As `fold_paths`, for patterns without braces, as `Glob.unmatched` returns: wildcards stay wildcards."""
    split = list(dict.fromkeys(split_path(pattern) for pattern in patterns))
    # Siblings are ordered alike everywhere, so that equal ones give equal text wherever they stand.
    rank: dict[str, int] = {}
    for segments in split:
        for segment in segments:
            rank.setdefault(segment, len(rank))
    position = {segments: at for at, segments in enumerate(split)}
    folded = sorted(_fold(split, rank).items(), key=lambda item: min(position[m] for m in item[1]))
    return [glob for text, members in folded for glob in _within_limits(text, members, rank)]


_Split = tuple[str, ...]


def _fold(patterns: Sequence[_Split], rank: dict[str, int]) -> dict[str, list[_Split]]:
    """Globs with the patterns that each stands for; every pattern is in one of them."""
    folded: dict[str, list[_Split]] = {}
    tails: dict[str, list[_Split]] = {}
    for pattern in patterns:
        if pattern:
            tails.setdefault(pattern[0], []).append(pattern[1:])
        else:
            folded[""] = [()]
    shared: dict[str, dict[str, list[_Split]]] = {}  # a folded tail -> its heads, and the tails it stands for
    for heads, some in _heads_and_tails(tails):
        for text, members in _fold(some, rank).items():
            shared.setdefault(text, {}).update(dict.fromkeys(heads, members))
    for text, by_head in shared.items():
        names = _fold_names(sorted(by_head, key=rank.__getitem__))
        folded[f"{names}.{text}" if text else names] = [
            (head, *member) for head, members in by_head.items() for member in members
        ]
    return folded


def _heads_and_tails(tails: dict[str, list[_Split]]) -> Iterator[tuple[list[str], list[_Split]]]:
    """Which heads have which tails, as sets to be multiplied.

    Numbered heads are repetitions of one thing: each tail goes with all heads that have it, so that what some
    layers have does not tear apart what all have. A head with a name of its own keeps its tails together.
    """
    holders: dict[_Split, list[str]] = {}
    for head, of_head in tails.items():
        if _NUMBERED.fullmatch(head):
            for tail in of_head:
                holders.setdefault(tail, []).append(head)
        else:
            yield [head], of_head
    by_heads: dict[tuple[str, ...], list[_Split]] = {}
    for tail, heads in holders.items():
        by_heads.setdefault(tuple(heads), []).append(tail)
    for together, some in by_heads.items():
        yield list(together), some


def _within_limits(glob: str, members: Sequence[_Split], rank: dict[str, int]) -> list[str]:
    if len(members) == 1 or (len(members) <= MAX_ALTERNATIVES and len(glob) <= MAX_LENGTH):
        return [glob]
    half = len(members) // 2
    return [
        part
        for some in (members[:half], members[half:])
        for folded, of_folded in _fold(some, rank).items()
        for part in _within_limits(folded, of_folded, rank)
    ]


def _fold_names(names: Sequence[str]) -> str:
    """One segment that stands for `names`: `wq`, `{wq,wk}`, `{0..31}`, `layer{1..4}`, `{{0..3},7,head}`."""
    stems: dict[str, list[int]] = {}  # what a number follows; for a name without one, the name itself
    plain: set[str] = set()
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        numbers = stems.setdefault(numbered[1] if numbered else name, [])
        if numbered:
            numbers.append(int(numbered[2]))
        else:
            plain.add(name)
    if len(stems) == 1 and not plain:
        [(stem, numbers)] = stems.items()
        return stem + _braced(list(_runs(sorted(numbers))))
    parts: list[str] = []
    for stem, numbers in stems.items():
        if stem in plain:
            parts.append(stem)
        parts.extend(stem + run for run in _runs(sorted(numbers)))
    return _braced(parts)


def _braced(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Ascending numbers as ranges where that is shorter, and one by one elsewhere."""
    at = 0
    while at < len(numbers):
        end = at + 1
        if end < len(numbers):
            step = numbers[end] - numbers[at]
            while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
                end += 1
            text = f"{{{numbers[at]}..{numbers[end - 1]}{f'..{step}' if step > 1 else ''}}}"
            listed = ",".join(map(str, numbers[at:end]))
            alone = end - at == len(numbers)  # then the list would need braces too
            if end - at > 2 and len(text) <= len(listed) + 2 * alone:
                yield text
                at = end
                continue
        yield str(numbers[at])
        at += 1
