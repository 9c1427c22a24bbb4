"""The recording of a model with many equal layers, from the recordings of two short ones.

The short models have n and n + 1 layers. Their recordings differ by what one more layer adds to each phase. Putting
that in as often as layers are missing gives the recording of the whole model, collective by collective and allocation
by allocation. Where the two do not differ by one layer's worth in one place, `NotPeriodic` is raised and the whole
model has to be recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parallelizer.compiler.observe.equal_layers import SHORT

T = TypeVar("T")
Token = tuple[Any, int | None]  # what an item is, and of which layer


class NotPeriodic(Exception):
    """The recordings of two short models do not differ by one layer."""


@dataclass(frozen=True)
class Look:
    """How `stretch` looks at an item: what it is apart from its layer, its layer, and the same item at
    another layer.
    """

    content: Callable[[Any], Any]
    index: Callable[[Any], int | None]
    moved: Callable[[Any, int], Any]


def in_module(item: T, module: str) -> T:
    """`dataclasses.replace(item, module=module)` in a third of its time: a step of many layers has hundred thousands of items."""
    made = object.__new__(type(item))
    made.__dict__.update(item.__dict__, module=module)
    return made


def stretch(short: Sequence[T], longer: Sequence[T], look: Look, layers: int, *, backward: bool) -> list[T]:
    """The recording of `layers` layers from those of SHORT and SHORT + 1. In backward, layers count from the
    end.

    One more layer adds to one place, or to two, of which the second belongs to no layer: what each layer has
    left behind is freed at the end.
    """
    extra = layers - (SHORT + 1)

    def token(item: T, count: int) -> Token:
        index = look.index(item)
        if index is not None and backward:
            index = count - 1 - index
        return look.content(item), index

    a = [token(i, SHORT) for i in short]
    b = [token(i, SHORT + 1) for i in longer]
    added, left_behind = _added(a, b)

    def place(item: T, tok: Token, by: int) -> T:
        if tok[1] is None:
            return item
        index = tok[1] + by
        return look.moved(item, layers - 1 - index if backward else index)

    def part(of: slice, by: int) -> list[T]:
        return [place(i, t, by) for i, t in zip(longer[of], b[of], strict=True)]

    result = part(slice(added.stop), 0)
    for by in range(1, extra + 1):
        result += part(added, by)
    result += part(slice(added.stop, left_behind.stop), extra)
    for _ in range(extra):
        result += longer[left_behind]
    return result + part(slice(left_behind.stop, None), extra)


def _added(a: Sequence[Token], b: Sequence[Token]) -> tuple[slice, slice]:
    """Where b has more than a: the items of one more layer, and further on more items of none, often nothing."""
    more = len(b) - len(a)
    if more < 0:
        raise NotPeriodic
    same = 0
    while same < len(a) and a[same] == b[same]:
        same += 1
    behind = 0
    while behind < len(a) - same and _follows(a[-1 - behind], b[-1 - behind]):
        behind += 1
    between, end = a[same : len(a) - behind], len(b) - behind
    found = []
    for count in range(more + 1):
        added, left_behind = slice(same, same + count), slice(end - (more - count), end)
        as_before = same >= count and all(map(_follows, b[same - count : same], b[added]))
        of_no_layer = all(index is None for _, index in b[left_behind])
        once_more = b[left_behind] == b[end : end + more - count]
        aligned = all(map(_follows, between, b[added.stop : left_behind.start]))
        if as_before and of_no_layer and once_more and aligned:
            found.append((added, left_behind))
    if len(found) != 1:
        raise NotPeriodic
    return found[0]


def _follows(x: Token, y: Token) -> bool:
    """Whether y is x one layer further."""
    return x[0] == y[0] and (y[1] is None if x[1] is None else y[1] == x[1] + 1)


Outline = Callable[[Sequence[T], Sequence[T]], list[T]]


def stretch_phases(
    short: Sequence[T],
    longer: Sequence[T],
    phase_of: Callable[[T], tuple[str, int]],
    look: Look,
    layers: int,
    outline: Outline[T] | None = None,
) -> list[T]:
    """As `stretch`, phase by phase; `phase_of` tells a phase's name and which of that name it is. `outline`
    makes what it can of a phase outside forward and backward that is not periodic: an operator over all
    parameters at once grows with the layers instead of coming once more.
    """
    a, b = (([(p, list(g)) for p, g in itertools.groupby(items, key=phase_of)]) for items in (short, longer))
    if [p for p, _ in a] != [p for p, _ in b]:
        raise NotPeriodic
    result: list[T] = []
    for ((name, _), x), (_, y) in zip(a, b, strict=True):
        try:
            result += stretch(x, y, look, layers, backward=name == "backward")
        except NotPeriodic:
            if outline is None or name in ("forward", "backward"):
                raise
            result += outline(x, y)
    return result
