"""Matching of module paths: the one place that knows what a plan's globs mean.

A path is dotted (`layers.0.attention.wq`); the root module's is `""` and has no segments. In a glob

    *         any characters inside one segment; a segment of the glob matches exactly one of the path
    **        any number of segments, none too; has a segment to itself; alone it matches every path
    ?         one character
    [abc]     one of a set, also `[a-c]`, `[!abc]` for any other, as in `fnmatch`; `[*]` is a star itself
    {a,b}     alternatives: they may hold dots, nest, and be empty
    {0..31}   whole numbers, also `{0..30..2}`, as in a shell: up or down, zero-padded if an end is

and everything else stands for itself; upper and lower case differ. `""` matches the root only.

Segments are matched by `fnmatch2.fnmatchcase2`, one at a time. Given whole paths it lets a pattern that ends
early match (`a` matches `a/b`) and never takes back what `**` skipped (`**/a/b` misses `a/c/a/b`). So the
walk along the segments is done here: a set of places moves through the glob, each place at most once for
each segment of it. That is also what keeps `**.a.**.a.**` from taking exponential time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from fnmatch2 import fnmatchcase2

MAX_LENGTH = 1000
"""The longest glob, in characters."""

MAX_ALTERNATIVES = 4096
"""The most patterns that the braces of one glob may expand to."""


class GlobError(ValueError):
    """A glob that does not parse.

    `message` names the problem, `help` says what to write instead; `offset` (0-based) and `length` (at
    least 1) are the narrowest wrong place in the text, in characters.
    """

    def __init__(self, message: str, offset: int, length: int, help: str) -> None:
        super().__init__(message, offset, length, help)
        self.message = message
        self.offset = offset
        self.length = length
        self.help = help

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Glob:
    """A parsed glob: its text, and the patterns without braces that it expands to, in order and each once.

    Made by `parse_glob`; nothing is checked here.
    """

    text: str
    alternatives: tuple[str, ...]

    def matches(self, path: str) -> bool:
        """Whether one of the alternatives matches the whole of `path`."""
        if path in self._literals:
            return True
        names = _segments(path)
        return any(_matches(_segments(pattern), names) for pattern in self._patterns)

    def select(self, paths: Iterable[str]) -> list[str]:
        """The paths that match, in the order of `paths`."""
        paths = tuple(paths)
        found: set[int] = set()
        for _, positions in self._found(_tree(paths)):
            found.update(positions)
        return [paths[position] for position in sorted(found)]

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """The alternatives that match none of `paths`."""
        return [alternative for alternative, positions in self._found(_tree(tuple(paths))) if not positions]

    @cached_property
    def _literals(self) -> frozenset[str]:
        return frozenset(a for a in self.alternatives if not _is_pattern(a))

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(a for a in self.alternatives if _is_pattern(a))

    def _found(self, tree: _Tree) -> Iterator[tuple[str, list[int]]]:
        """Every alternative with the positions of the paths that it matches."""
        # Alternatives of one glob mostly begin alike: what a beginning reaches is worked out once.
        reached: dict[tuple[str, ...], list[int]] = {(): [0]}
        for alternative in self.alternatives:
            if alternative in self._literals:
                yield alternative, tree.positions.get(alternative, [])
                continue
            segments = _segments(alternative)
            nodes = reached[()]
            for depth in range(1, len(segments) + 1):
                beginning = segments[:depth]
                if beginning not in reached:
                    reached[beginning] = _step(tree, nodes, segments[depth - 1])
                nodes = reached[beginning]
                if not nodes:
                    break
            yield alternative, [position for node in nodes for position in tree.ending[node]]


# --- parsing ----------------------------------------------------------------------

_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?\}")
_CLASS = re.compile(r"\[!?+\]?+[^\]]*\]")
_SPECIAL = re.compile(r"[\[\]{},\\\s]")

_Piece = tuple[str, int]
"""A stretch of an alternative's text, and the offset in the glob that it came from."""
_Pieces = tuple[_Piece, ...]


def parse_glob(text: str) -> Glob:
    """Parse and expand a glob.

    Raises `GlobError` for one that is malformed, longer than `MAX_LENGTH`, or that would expand to more than
    `MAX_ALTERNATIVES` patterns; they are counted before they are made.
    """
    if len(text) > MAX_LENGTH:
        raise GlobError(
            f"this glob is {len(text)} characters long; the limit is {MAX_LENGTH}",
            MAX_LENGTH,
            len(text) - MAX_LENGTH,
            "split it into several rules",
        )
    expanded = _expand(text)
    for pieces in expanded:
        _check_segments(pieces)
    return Glob(text, tuple(dict.fromkeys(_text(pieces) for pieces in expanded)))


class _Group:
    """Braces that are still open, or the whole glob: the finished choices, and the present one so far."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.commas = 0
        self.choices: list[_Pieces] = []
        self.current: list[_Pieces] = [()]

    def extend(self, alternatives: Sequence[_Pieces], start: int, end: int) -> None:
        """Follow the present choice with one of `alternatives`, which stand at `start:end` in the glob."""
        _check_count(len(self.current) * len(alternatives), start, end)
        self.current = [left + right for left in self.current for right in alternatives]

    def comma(self, end: int) -> None:
        """Close the present choice and begin another."""
        self.commas += 1
        self.choices += self.current
        self.current = [()]
        _check_count(len(self.choices), self.start, end)


def _expand(text: str) -> list[_Pieces]:
    """Every alternative in the shell's order: the rightmost braces turn fastest."""
    group, outer = _Group(0), list[_Group]()  # an explicit stack: braces may nest as deep as they like
    at = 0
    while at < len(text):
        char = text[at]
        end = at + 1
        if char == "{" and (numbers := _RANGE.match(text, at)):
            end = numbers.end()
            group.extend(_range(numbers), at, end)
        elif char == "{":
            outer.append(group)
            group = _Group(at)
        elif char == "}":
            if not outer:
                raise GlobError(
                    "this `}` closes nothing", at, 1, "open it with `{`, or write `[}]` for the character"
                )
            group.comma(end)
            if group.commas == 1:
                raise _no_alternatives(text, group.start, end)
            start, choices, group = group.start, group.choices, outer.pop()
            group.extend(choices, start, end)
        elif char == "," and outer:
            group.comma(end)
        elif char == "[":
            end = _class_end(text, at)
            group.extend([((text[at:end], at),)], at, end)
        elif char == "]":
            raise GlobError(
                "this `]` closes nothing", at, 1, "open it with `[`, or write `[]]` for the character"
            )
        elif char == "\\":
            raise GlobError(
                "a glob has no escape character", at, 1, r"write `[*]` for a star itself, `[\]` for `\`"
            )
        elif char.isspace():
            raise GlobError(
                "a blank in a glob", at, 1, "leave it out: `{a,b}`; or write `[ ]` for the character"
            )
        else:
            special = _SPECIAL.search(text, end)
            end = special.start() if special else len(text)
            group.extend([((text[at:end], at),)], at, end)
        at = end
    if outer:
        raise GlobError(
            "this `{` is never closed", group.start, 1, "close it with `}`, or write `[{]` for the character"
        )
    return group.current


def _range(numbers: re.Match[str]) -> list[_Pieces]:
    """The numbers of `{first..last..step}`; as in a shell the step's sign does not matter."""
    first, last = int(numbers[1]), int(numbers[2])
    step = abs(int(numbers[3])) if numbers[3] else 1
    if step == 0:
        raise GlobError(
            "the step of a range is 0",
            numbers.start(3),
            len(numbers[3]),
            f"write a step of 1 or more, or none: `{{{numbers[1]}..{numbers[2]}}}`",
        )
    _check_count(abs(last - first) // step + 1, numbers.start(), numbers.end())
    padded = any(re.match(r"-?0[0-9]", number) for number in (numbers[1], numbers[2]))
    width = max(len(numbers[1]), len(numbers[2])) if padded else 0
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [((f"{value:0{width}d}", numbers.start()),) for value in values]


def _check_count(count: int, start: int, end: int) -> None:
    if count > MAX_ALTERNATIVES:
        raise GlobError(
            f"with these braces the glob has more than {MAX_ALTERNATIVES} alternatives",
            start,
            end - start,
            "write `*` where any name will do, or split the glob into several rules",
        )


def _no_alternatives(text: str, start: int, end: int) -> GlobError:
    body = text[start:end]
    if ".." in body:
        advice = "a range is of whole numbers, `{0..31}` or `{0..30..2}`; letters are `[a-c]`"
    else:
        advice = "write `{a,b}`, or leave the braces out; `[{]` is the character"
    return GlobError("these braces hold no alternatives", start, end - start, advice)


def _class_end(text: str, start: int) -> int:
    """One past the `]` that closes the `[` at `start`."""
    closed = _CLASS.match(text, start)
    if closed is None or "." in closed[0]:
        dot = text.find(".", start)
        end = dot if dot >= 0 else len(text)
        raise GlobError(
            "this `[` is not closed in its segment",
            start,
            end - start,
            "close it with `]`, or write `[[]` for the character",
        )
    if closed[0].startswith("[^"):
        raise GlobError(
            "`^` does not negate a set", start + 1, 1, f"write `[!{closed[0][2:]}`; a `^` itself goes last"
        )
    return closed.end()


def _check_segments(pieces: _Pieces) -> None:
    """Raise for an empty segment, and for `**` beside other characters."""
    text = _text(pieces)
    start = 0
    for segment in text.split(".") if text else ():
        if not segment:
            numbers = re.search(r"-?[0-9]+\.\.-?[0-9]+", text)
            raise GlobError(
                f"an empty segment in `{text}`",
                _offset(pieces, min(start, len(text) - 1)),
                1,
                f"a range stands in braces of its own: `{{{numbers[0]}}}`"
                if numbers
                else 'write one dot between segments and none at the ends; the root is `""`',
            )
        # Stars in a set are characters; they are blanked out, so that the others keep their positions.
        unset = _CLASS.sub(lambda found: "?" * len(found[0]), segment) if "[" in segment else segment
        stars = re.search(r"\*\*+", unset)
        if stars and segment != "**":
            first, last = (_offset(pieces, start + at) for at in (stars.start(), stars.end() - 1))
            raise GlobError(
                f"`**` is only a part of the segment `{segment}`",
                first,
                last - first + 1,
                "write `*` inside a segment, or give `**` one of its own: `**.name`",
            )
        start += len(segment) + 1


def _text(pieces: _Pieces) -> str:
    return "".join(text for text, _ in pieces)


def _offset(pieces: _Pieces, index: int) -> int:
    """Where in the glob the character `index` of an alternative was written."""
    for text, offset in pieces:
        if index < len(text):
            return offset + index
        index -= len(text)
    raise IndexError(index)


# --- matching ----------------------------------------------------------------------


def _segments(dotted: str) -> tuple[str, ...]:
    return tuple(dotted.split(".")) if dotted else ()


def _is_pattern(text: str) -> bool:
    return any(char in text for char in "*?[")


@lru_cache(maxsize=2**16)
def _segment_matches(pattern: str, name: str) -> bool:
    # fnmatch2 takes both slashes for separators; in a module's name they are characters like any other.
    if any(slash in text for slash in "/\\" for text in (pattern, name)):
        return fnmatchcase(name, pattern)
    return fnmatchcase2(name, pattern)


def _matches(pattern: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a pattern without braces matches all of `names`, in len(pattern) x len(names) steps at most."""
    places = {0}  # how many names may have been used up
    for segment in pattern:
        if segment == "**":
            places = set(range(min(places), len(names) + 1))
        else:
            places = {at + 1 for at in places if at < len(names) and _segment_matches(segment, names[at])}
        if not places:
            return False
    return len(names) in places


@dataclass(frozen=True)
class _Tree:
    """Paths as a tree of segments. Nodes are numbered in preorder: 0 is the root, a subtree is a range."""

    children: list[dict[str, int]]
    ends: list[int]
    """One past the last node of each node's subtree."""
    ending: list[list[int]]
    """The positions of the paths that end at each node."""
    positions: dict[str, list[int]]
    """The positions of each path (several if it was given several times)."""


@lru_cache(maxsize=8)
def _tree(paths: tuple[str, ...]) -> _Tree:
    positions: dict[str, list[int]] = {}
    for position, path in enumerate(paths):
        positions.setdefault(path, []).append(position)
    children: list[dict[str, int]] = [{}]
    ending: list[list[int]] = [[]]
    for path in sorted(positions, key=_segments):  # sorted by segments, new nodes come in preorder
        node = 0
        for name in _segments(path):
            if name not in children[node]:
                children[node][name] = len(children)
                children.append({})
                ending.append([])
            node = children[node][name]
        ending[node] = positions[path]
    ends = [0] * len(children)
    for node in reversed(range(len(children))):
        ends[node] = ends[max(children[node].values())] if children[node] else node + 1
    return _Tree(children, ends, ending, positions)


def _step(tree: _Tree, nodes: Sequence[int], segment: str) -> list[int]:
    """The nodes, each once, that one segment of a pattern leads to from `nodes` (distinct)."""
    if segment == "**":
        reached: list[int] = []
        end = 0
        for node in sorted(nodes):
            if node >= end:  # otherwise inside the subtree that was just added
                end = tree.ends[node]
                reached.extend(range(node, end))
        return reached
    if _is_pattern(segment):
        return [
            child
            for node in nodes
            for name, child in tree.children[node].items()
            if _segment_matches(segment, name)
        ]
    return [child for node in nodes if (child := tree.children[node].get(segment)) is not None]


# --- folding ----------------------------------------------------------------------

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})", re.DOTALL)


def fold_paths(paths: Iterable[str]) -> list[str]:
    """Few globs that match exactly `paths`: `["layers.{0..31}.attention.{wq,wk,wv}"]` for 96 modules.

    Equal siblings share braces; numbers become ranges, also at the end of a name (`layer{1..4}`). Every path
    is in exactly one of the globs. Globs and siblings come in order of first appearance, numbers ascending.
    Each glob parses, unless it is one path that is by itself longer than `MAX_LENGTH`.
    """
    return fold_alternatives(_escaped(path) for path in paths)


def fold_alternatives(patterns: Iterable[str]) -> list[str]:
    """As `fold_paths`, for patterns without braces, as `Glob.unmatched` returns: wildcards stay wildcards."""
    split = list(dict.fromkeys(_segments(pattern) for pattern in patterns))
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


def _escaped(path: str) -> str:
    """The pattern that matches `path` and nothing else."""
    return re.sub(r"[*?\[\]{},\\\s]", lambda special: f"[{special[0]}]", path)


# --- suggesting ----------------------------------------------------------------------


def nearest(text: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """At most `n` of `candidates` that `text` may be a misspelling of, nearest first; none if none is near.

    Near is one edit (a character too many, too few, another, or two neighbours swapped), two from 5
    characters on, three from 10 on. Case counts for nothing; names with nothing in common are never near.
    After those come candidates that begin with `text`, if it has 3 characters or more.
    """
    wanted = text.lower()
    limit = min(3, 1 + len(wanted) // 5)
    found: list[tuple[int, str]] = []
    for candidate in dict.fromkeys(candidates):
        name = candidate.lower()
        distance = _distance(wanted, name, limit)
        if distance <= limit and distance < max(len(wanted), len(name), 1):
            found.append((distance, candidate))
        elif len(wanted) >= 3 and name.startswith(wanted):
            found.append((limit + 1, candidate))
    found.sort(key=lambda pair: pair[0])
    # Beside a name that differs only in case no other is meant; beside one a letter off, none three off.
    farthest = found[0][0] + (found[0][0] > 0) if found else 0
    return [candidate for distance, candidate in found if distance <= farthest][:n]


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


def suggest(text: str, paths: Sequence[str]) -> list[tuple[str, int]]:
    """What a glob that matches nothing may have been meant to be: at most 3 globs, best first, each with the
    number of paths (at least 1) that it matches.

    Tried are a name spelled like one that is there, a segment left out, a first segment too many, and `**`
    where `*` or nothing cannot reach; two of these together only if no single one helps. Nothing for a glob
    that does match, does not parse, or whose braces hold hundreds of wildcards.
    """
    try:
        if parse_glob(text).select(paths):
            return []
    except GlobError:
        return []
    units = _units(text)
    if sum(_is_pattern(a) for unit in units for a in _alternatives(unit)) > _MOST_PATTERNS:
        return []
    tree = _tree(tuple(paths))
    for edits, start in ((0, _units(text.replace("/", "."))), (1, units), (2, units)):
        merits: dict[str, tuple[int, ...]] = {}
        for merit, edited in _edited(tree, [0], start, edits):
            glob = ".".join(edited)
            merits[glob] = min(merit, merits.get(glob, merit))
        found = _distinct(sorted(merits, key=lambda glob: (merits[glob], len(glob), glob)), paths)
        if found:
            found.sort(key=lambda pair: (merits[pair[0]], -pair[1]))
            return found[:3]
    return []


def _distinct(globs: Iterable[str], paths: Sequence[str]) -> list[tuple[str, int]]:
    """The globs that match something, and not the same as an earlier one, each with the number of matches."""
    found: dict[tuple[str, ...], str] = {}
    for glob in globs:
        try:
            matched = parse_glob(glob).select(paths)
        except GlobError:  # an edit may push a long glob over the limits
            continue
        if matched:
            found.setdefault(tuple(matched), glob)
    return [(glob, len(matched)) for matched, glob in found.items()]


def _units(text: str) -> tuple[str, ...]:
    """A glob cut at the dots that stand outside braces; each part is a glob too."""
    units = [""]
    depth = 0
    for token in re.findall(rf"{_CLASS.pattern}|.", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if token == "." and not depth:
            units.append("")
        else:
            units[-1] += token
    return tuple(units)


def _reach(tree: _Tree, nodes: list[int], units: Sequence[str]) -> list[int]:
    """The nodes, each once, that some units lead to."""
    for unit in units:
        alternatives = _alternatives(unit)
        # A long list of plain names, such as `{0..125}`, is looked up at once.
        plain = {a for a in alternatives if a and "." not in a and not _is_pattern(a)}
        reached = {child for node in nodes for name, child in tree.children[node].items() if name in plain}
        for alternative in alternatives:
            if alternative not in plain:
                ahead = nodes
                for segment in _segments(alternative):
                    ahead = _step(tree, ahead, segment)
                reached.update(ahead)
        nodes = sorted(reached)
    return nodes


@lru_cache(maxsize=256)
def _alternatives(unit: str) -> tuple[str, ...]:
    try:
        return parse_glob(unit).alternatives
    except GlobError:  # an edit may make one that is too long
        return ()


def _edited(
    tree: _Tree, nodes: list[int], units: tuple[str, ...], edits: int
) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Ways to change `edits` units so that they lead from `nodes` to paths, with merits (low is good)."""
    if not edits:
        if any(tree.ending[node] for node in _reach(tree, nodes, units)):
            yield (), units
        return
    for at, unit in enumerate(units):
        for merit, changed in _edits(tree, nodes, units, at):
            reached = _reach(tree, nodes, changed)
            if reached:
                for more, rest in _edited(tree, reached, units[at + 1 :], edits - 1):
                    yield merit + more, units[:at] + changed + rest
        nodes = _reach(tree, nodes, [unit])
        if not nodes:
            return


_MOST_PATTERNS = 200
"""How many patterns a glob may consist of for suggestions to be looked for; what people write has a few."""

_MOST_NAMES = 200
"""How many names are tried for a segment that was left out; real modules have far fewer kinds of children."""


def _edits(
    tree: _Tree, nodes: Sequence[int], units: tuple[str, ...], at: int
) -> Iterator[tuple[tuple[int, int], tuple[str, ...]]]:
    """What might have been meant by one unit, where `nodes` is what came before it, likeliest kinds first."""
    unit = units[at]
    names = dict.fromkeys(name for node in nodes for name in tree.children[node])
    for order, spelled in enumerate(_respelled(unit, names)):
        yield (0, order), (spelled,)
    kinds = dict.fromkeys("*" if name.isdecimal() else _escaped(name) for name in names)
    if unit != "**":
        for kind in list(kinds)[:_MOST_NAMES]:
            yield (1, int(kind == "*")), (kind, unit)
    if at == 0 and len(units) > 1 and units[1].strip("*"):
        yield (2, 0), ()
    if unit == "*":
        yield (3, 0), ("**",)
    elif unit.startswith("*") and unit != "**":
        yield (3, 0), ("**", unit[1:])
    if unit != "**":
        yield (4, 0), ("**", unit)


def _respelled(unit: str, names: Iterable[str]) -> list[str]:
    """Spellings of a unit that use `names`; `*` for numbers, of which none is nearer than another."""
    if re.fullmatch(r"[0-9{},.]+", unit):
        return ["*"] if any(name.isdecimal() for name in names) else []
    if _is_pattern(unit):
        return []
    if "{" not in unit:
        return [_escaped(name) for name in nearest(unit, names)]

    def word(written: re.Match[str]) -> str:
        near = nearest(written[0], names, n=1)
        return _escaped(near[0]) if near else written[0]

    return [re.sub(r"[^{},.]+", word, unit)]
