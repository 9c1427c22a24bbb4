"""The recording of a model with many equal layers, from the recordings of short ones.

A short model has n layers of every run of equal layers; of each run another one has n + 1. Their recordings differ by what one
more layer adds to each phase. Putting that in as often as layers are missing gives the recording of the whole model: each
collective and each allocation. Where they do not differ by one layer's worth in one place, `NotPeriodic` is raised and the whole
model has to be recorded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from parallelizer.compiler.observe.equal_layers import SHORT, Run

T = TypeVar("T")


class NotPeriodic(Exception):
    """The recordings of two short models do not differ by one layer."""


@dataclass(frozen=True)
class Look(Generic[T]):
    """How `stretch` looks at an item: the module that it belongs to, and the same item in another."""

    module: Callable[[T], str]
    moved: Callable[[T, str], T]


Outline = Callable[[Sequence[T], Sequence[Sequence[T]], Sequence[int]], list[T]]
"""Makes of a short phase and of longer ones, one for each run, the phase of all layers, of which so many are missing in the short
one.
"""


def in_module(item: T, module: str) -> T:
    """`dataclasses.replace(item, module=module)` in a third of its time: a step of many layers has hundred thousands of items."""
    made = object.__new__(type(item))
    made.__dict__.update(item.__dict__, module=module)
    return made


class _Token(NamedTuple):
    """What an item is apart from its layer; its run, and the layer of that run, in backward counted from the end."""

    content: Any
    run: int | None
    layer: int


class _Edit(NamedTuple):
    """Items of one more layer of a run, and the place in the short recording at which they come in. Where they `grow`, each comes
    in for another layer.
    """

    at: int
    run: int
    grows: bool
    piece: Sequence[_Token]


def extended(short: int, longer: Iterable[int], missing: Sequence[int]) -> int:
    """A number in a straight line: for each run, as often as layers of it are `missing`, what `longer` has more than `short`."""
    return short + sum(more * (long - short) for long, more in zip(longer, missing, strict=True))


def stretch(
    short: Sequence[T], longer: Sequence[Sequence[T]], look: Look[T], runs: Sequence[Run], *, backward: bool
) -> list[T]:
    """The recording of all layers of the `runs` from that of SHORT layers of each, and for every run one of SHORT + 1. In
    backward, layers count from the end.

    One more layer adds to one place, or to two, of which the second belongs to no layer: what each layer has left behind is freed
    at the end.
    """
    base = _tokens(short, look, runs, None, backward)
    edits: list[_Edit] = []
    for run, items in enumerate(longer):
        tokens = _tokens(items, look, runs, run, backward)
        added, left_behind = _added(base, tokens, run)
        behind = left_behind.start - (added.stop - added.start)
        edits += [
            _Edit(added.start, run, True, tokens[added]),
            _Edit(behind, run, False, tokens[left_behind]),
        ]
    edits.sort(key=lambda edit: edit.at)
    told = [edit for edit in edits if edit.piece]
    for a, b in itertools.pairwise(told):
        if a.at == b.at and a.run != b.run and (a.grows or b.grows or a.piece != b.piece):
            raise NotPeriodic  # which comes first is not known
    joined = functools.cache(lambda pattern, layer: pattern.replace("*", str(layer), 1))
    shifts, result, done = [0] * len(runs), list[T](), 0

    def put(tokens: Sequence[_Token]) -> None:
        for content, run, layer in tokens:
            if run is None:
                result.append(content)
                continue
            at = layer + shifts[run]
            at = runs[run].first + (runs[run].count - 1 - at if backward else at)
            result.append(look.moved(content, joined(look.module(content), at)))

    for at, run, grows, piece in edits:
        put(base[done:at])
        done = at
        for _ in range(runs[run].count - SHORT):
            put(piece)
            shifts[run] += grows
    put(base[done:])
    return result


def _tokens(
    items: Sequence[T], look: Look[T], runs: Sequence[Run], longer: int | None, backward: bool
) -> list[_Token]:
    """What is seen of a recording of a short model, which has one more layer of the run `longer`."""
    place = functools.cache(functools.partial(_place, tuple(runs), longer))
    tokens = []
    for item in items:
        path, run, index = place(look.module(item))
        if run is not None and backward:
            index = SHORT + (run == longer) - 1 - index
        tokens.append(_Token(look.moved(item, path), run, index))
    return tokens


def _place(runs: Sequence[Run], longer: int | None, path: str) -> tuple[str, int | None, int]:
    """Where a module of a short model lies in the whole one: its path, of a layer of a run with * in the place of its index; that
    run; and the layer in the short model. Of the run `longer` that has one more.
    """
    for container in {run.container for run in runs}:
        prefix = f"{container}." if container else ""
        head, dot, rest = path.removeprefix(prefix).partition(".")
        if not path.startswith(prefix) or not head.isdigit():
            continue
        at = int(head)  # in the whole container
        for number, run in sorted(enumerate(runs), key=lambda pair: pair[1].first):
            if run.container != container or at < run.first:
                continue
            keep = SHORT + (number == longer)
            if at < run.first + keep:
                return f"{prefix}*{dot}{rest}", number, at - run.first
            at += run.count - keep
        return f"{prefix}{at}{dot}{rest}", None, 0
    return path, None, 0


def _added(a: Sequence[_Token], b: Sequence[_Token], run: int) -> tuple[slice, slice]:
    """Where b has more than a: the items of one more layer of the run, and further on more of none of its layers, often none."""
    follows = functools.partial(_follows, run)
    more = len(b) - len(a)
    if more < 0:
        raise NotPeriodic
    same = 0
    while same < len(a) and a[same] == b[same]:
        same += 1
    behind = 0
    while behind < len(a) - same and follows(a[-1 - behind], b[-1 - behind]):
        behind += 1
    between, end = a[same : len(a) - behind], len(b) - behind
    found = []
    for count in range(more + 1):
        added, left_behind = slice(same, same + count), slice(end - (more - count), end)
        as_before = same >= count and all(map(follows, b[same - count : same], b[added]))
        of_no_layer = all(token.run != run for token in b[left_behind])
        once_more = b[left_behind] == b[end : end + more - count]
        aligned = all(map(follows, between, b[added.stop : left_behind.start]))
        if as_before and of_no_layer and once_more and aligned:
            found.append((added, left_behind))
    if len(found) != 1:
        raise NotPeriodic
    return found[0]


def _follows(run: int, x: _Token, y: _Token) -> bool:
    """Whether y is x one layer of the run further."""
    return x.content == y.content and x.run == y.run and y.layer == x.layer + (x.run == run)


def stretch_phases(
    short: Sequence[T],
    longer: Sequence[Sequence[T]],
    phase_of: Callable[[T], tuple[str, int]],
    look: Look[T],
    runs: Sequence[Run],
    outline: Outline[T] | None = None,
) -> list[T]:
    """As `stretch`, phase by phase; `phase_of` tells a phase's name and which of that name it is. `outline` makes what it can of
    a phase outside forward and backward that is not periodic: an operator over all parameters at once grows with the layers
    instead of coming once more.
    """
    first, *others = (
        [(p, list(g)) for p, g in itertools.groupby(items, key=phase_of)] for items in (short, *longer)
    )
    if any([p for p, _ in one] != [p for p, _ in first] for one in others):
        raise NotPeriodic
    missing = [run.count - SHORT for run in runs]
    result: list[T] = []
    for ((name, _), x), *more in zip(first, *others, strict=True):
        each = [items for _, items in more]
        try:
            result += stretch(x, each, look, runs, backward=name == "backward")
        except NotPeriodic:
            if outline is None or name in ("forward", "backward"):
                raise
            result += outline(x, each, missing)
    return result
