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

import itertools
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


MAX_SETS, MAX_MEMBERS = 8, 40
"""How many sets of a glob, and characters of a set, are looked at one by one; what people write has a few."""


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
        names = split_path(path)
        return any(_matches(split_path(pattern), names) for pattern in self._patterns)

    def select(self, paths: Iterable[str]) -> list[str]:
        """The paths that match, in the order of `paths`."""
        paths = tuple(paths)
        found: set[int] = set()
        for _, positions in self._found(path_tree(paths)):
            found.update(positions)
        return [paths[position] for position in sorted(found)]

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """The alternatives that match none of `paths`."""
        return [
            alternative for alternative, positions in self._found(path_tree(tuple(paths))) if not positions
        ]

    def idle_characters(self, paths: Iterable[str]) -> list[tuple[str, str]]:
        """The characters of sets that change nothing, each with its set: those that stand there twice, and those
        with which the glob matches none of `paths`. Ranges (`[a-c]`) and negated sets are left alone.
        """
        paths, idle = tuple(paths), []
        for found in itertools.islice(CHARACTER_SET.finditer(self.text), MAX_SETS):
            members = _RANGE_IN_SET.sub("", found[0][1:-1])
            if found[0].startswith("[!"):
                continue
            before, after = self.text[: found.start()], self.text[found.end() :]
            for at, member in enumerate(members[:MAX_MEMBERS]):
                if member in members[:at] or not parse_glob(f"{before}{escape(member)}{after}").select(paths):
                    idle.append((member, found[0]))
        return idle

    @cached_property
    def _literals(self) -> frozenset[str]:
        return frozenset(a for a in self.alternatives if not is_pattern(a))

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(a for a in self.alternatives if is_pattern(a))

    def _found(self, tree: PathTree) -> Iterator[tuple[str, list[int]]]:
        """Every alternative with the positions of the paths that it matches."""
        # Alternatives of one glob mostly begin alike: what a beginning reaches is worked out once.
        reached: dict[tuple[str, ...], list[int]] = {(): [0]}
        for alternative in self.alternatives:
            if alternative in self._literals:
                yield alternative, tree.positions.get(alternative, [])
                continue
            segments = split_path(alternative)
            nodes = reached[()]
            for depth in range(1, len(segments) + 1):
                beginning = segments[:depth]
                if beginning not in reached:
                    reached[beginning] = step_down(tree, nodes, segments[depth - 1])
                nodes = reached[beginning]
                if not nodes:
                    break
            yield alternative, [position for node in nodes for position in tree.ending[node]]


# --- parsing ----------------------------------------------------------------------

_RANGE = re.compile(r"\{(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?\}")
CHARACTER_SET = re.compile(r"\[!?+\]?+[^\]]*\]")
"""A set such as `[abc]`, with its brackets; a `]` that comes first belongs to it."""
_RANGE_IN_SET = re.compile(r"[^]]-[^]]", re.DOTALL)
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
                    "this `}` has no opening `{`", at, 1, "open it with `{`, or write `[}]` for the character"
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
                "this `]` has no opening `[`", at, 1, "open it with `[`, or write `[]]` for the character"
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
        advice = "a range takes whole numbers, as in `{0..31}` or `{0..30..2}`; for letters write `[a-c]`"
    else:
        advice = "write `{a,b}`, or leave the braces out; `[{]` is the character"
    return GlobError("these braces hold no alternatives", start, end - start, advice)


def _class_end(text: str, start: int) -> int:
    """One past the `]` that closes the `[` at `start`."""
    closed = CHARACTER_SET.match(text, start)
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
                f"a range needs its own braces: `{{{numbers[0]}}}`"
                if numbers
                else 'write one dot between segments and none at the ends; the root is `""`',
            )
        # Stars in a set are characters; they are blanked out, so that the others keep their positions.
        unset = CHARACTER_SET.sub(lambda found: "?" * len(found[0]), segment) if "[" in segment else segment
        stars = re.search(r"\*\*+", unset)
        if stars and segment != "**":
            first, last = (_offset(pieces, start + at) for at in (stars.start(), stars.end() - 1))
            raise GlobError(
                f"`**` is only a part of the segment `{segment}`",
                first,
                last - first + 1,
                "write `*` inside a segment, or write `**` as a segment of its own: `**.name`",
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


def outer_braces(text: str) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The braces of a well-formed glob that stand in no others: where they begin and end, and where each of their
    choices does. Ranges such as `{0..3}` are left out.
    """
    depth, opening, starts = 0, 0, [0]
    for token in re.finditer(rf"{CHARACTER_SET.pattern}|[{{}},]", text):
        mark, at = token[0], token.start()
        if mark == "{":
            depth += 1
            if depth == 1:
                opening, starts = at, [at + 1]
        elif mark == "," and depth == 1:
            starts.append(at + 1)
        elif mark == "}":
            depth -= 1
            if depth == 0 and len(starts) > 1:
                ends = [start - 1 for start in starts[1:]] + [at]
                yield opening, at + 1, list(zip(starts, ends, strict=True))


# --- matching ----------------------------------------------------------------------


def split_path(dotted: str) -> tuple[str, ...]:
    """The segments of a path or of a pattern without braces; the root has none."""
    return tuple(dotted.split(".")) if dotted else ()


def escape(path: str) -> str:
    """The pattern that matches `path` and nothing else."""
    return re.sub(r"[*?\[\]{},\\\s]", lambda special: f"[{special[0]}]", path)


def is_pattern(text: str) -> bool:
    """Whether a text without braces has wildcards, so that it may match more than itself."""
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
class PathTree:
    """Paths as a tree of segments. Nodes are numbered in preorder: 0 is the root, a subtree is a range."""

    children: list[dict[str, int]]
    ends: list[int]
    """One past the last node of each node's subtree."""
    ending: list[list[int]]
    """The positions of the paths that end at each node."""
    positions: dict[str, list[int]]
    """The positions of each path (several if it was given several times)."""


@lru_cache(maxsize=8)
def path_tree(paths: tuple[str, ...]) -> PathTree:
    """The tree of some paths, remembered, because many globs are looked up in the same model."""
    positions: dict[str, list[int]] = {}
    for position, path in enumerate(paths):
        positions.setdefault(path, []).append(position)
    children: list[dict[str, int]] = [{}]
    ending: list[list[int]] = [[]]
    for path in sorted(positions, key=split_path):  # sorted by segments, new nodes come in preorder
        node = 0
        for name in split_path(path):
            if name not in children[node]:
                children[node][name] = len(children)
                children.append({})
                ending.append([])
            node = children[node][name]
        ending[node] = positions[path]
    ends = [0] * len(children)
    for node in reversed(range(len(children))):
        ends[node] = ends[max(children[node].values())] if children[node] else node + 1
    return PathTree(children, ends, ending, positions)


def step_down(tree: PathTree, nodes: Sequence[int], segment: str) -> list[int]:
    """The nodes, each once, that one segment of a pattern leads to from `nodes` (distinct)."""
    if segment == "**":
        reached: list[int] = []
        end = 0
        for node in sorted(nodes):
            if node >= end:  # otherwise inside the subtree that was just added
                end = tree.ends[node]
                reached.extend(range(node, end))
        return reached
    if is_pattern(segment):
        return [
            child
            for node in nodes
            for name, child in tree.children[node].items()
            if _segment_matches(segment, name)
        ]
    return [child for node in nodes if (child := tree.children[node].get(segment)) is not None]
