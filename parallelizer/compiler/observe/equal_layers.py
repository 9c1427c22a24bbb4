"""Layers that are the same are traced once: a model of few layers stands for one of many.

Two short models, of n and n + 1 layers, are traced. Their recordings differ by what one more layer adds to
each phase; putting that in as often as layers are missing gives the recording of the whole model, collective
by collective and allocation by allocation. Where the two do not differ by one layer's worth in one place,
`NotPeriodic` is raised and the whole model is traced.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from parallelizer.program import Application, Program

T = TypeVar("T")
Token = tuple[Any, int | None]  # what an item is, and of which layer
SHORT = 3
"""Layers of the shorter model: a first, a last and one between them, since FSDP treats the ends
differently.
"""


class NotPeriodic(Exception):
    """The recordings of two short models do not differ by one layer."""


@dataclass(frozen=True)
class Run:
    """`count` equal children of one container, from index `first`."""

    container: str
    first: int
    count: int

    def split(self, path: str) -> tuple[str, int | None]:
        """A path with the layer's index taken out, and that index; None for a path outside the run."""
        prefix = f"{self.container}." if self.container else ""
        if not path.startswith(prefix):
            return path, None
        head, _, rest = path[len(prefix) :].partition(".")
        if not head.isdigit() or not self.first <= int(head) < self.first + self.count:
            return path, None
        return f"{prefix}*.{rest}", int(head) - self.first

    def stands_for(self, path: str) -> Iterator[str]:
        """The paths in the whole model that one in a model of SHORT layers stands for."""
        pattern, index = self.split(path)
        if index is None:
            yield path
        elif index == 1:  # the layers between the first and the last
            for each in range(1, self.count - SHORT + 2):
                yield self.join(pattern, each)
        else:
            yield self.join(pattern, self.count - 1 if index == SHORT - 1 else index)

    def join(self, path: str, index: int | None) -> str:
        """The inverse of `split`."""
        return path if index is None else path.replace("*", str(self.first + index), 1).rstrip(".")


def longest_run(program: Iterable[Application], model: nn.Module) -> Run | None:
    """The longest run of equal layers, if tracing two short models costs less than the whole one."""
    styles: dict[str, list[Facts]] = {}
    for a in program:
        styles.setdefault(a.module, []).append(
            (a.slot, a.style, a.axes, a.rule.key, str(sorted(a.options.items(), key=str)))
        )
    best: Run | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or None in module._modules.values():
            continue  # a list may hold None
        first = 0
        for _, group in itertools.groupby(_signatures(module, f"{path}." if path else "", styles)):
            count = len(list(group))
            if count > 2 * SHORT + 1 and (best is None or count > best.count):
                best = Run(path, first, count)
            first += count
    return best


Facts = tuple[Any, ...]


def _signatures(
    container: Iterable[nn.Module], prefix: str, styles: Mapping[str, list[Facts]]
) -> list[Facts]:
    """For each child everything that makes two of them behave alike. What counts the children is no
    difference between them.
    """
    children = list(container)
    attributes = [_attributes(child) for child in children]
    holders: dict[tuple[str, str], list[bool]] = {}
    for index, own in enumerate(attributes):
        for key, value in own.items():
            holders.setdefault(key, []).append(type(value) is int and value == index)
    numbers = {key for key, counts in holders.items() if len(counts) > 1 and all(counts)}
    signatures = []
    for index, (child, own) in enumerate(zip(children, attributes, strict=True)):
        modules = tuple(
            (n, type(m), *styles.get(f"{prefix}{index}.{n}".rstrip("."), ()))
            for n, m in child.named_modules()
        )
        tensors = tuple(
            (n, tuple(t.shape), t.dtype, t.requires_grad)
            for n, t in (*child.named_parameters(), *child.named_buffers())
        )
        signatures.append((modules, tensors, tuple((k, v) for k, v in own.items() if k not in numbers)))
    return signatures


def _attributes(layer: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (n, k): _plain(v)
        for n, m in layer.named_modules()
        for k, v in vars(m).items()
        if not k.startswith("_")
    }


def _plain(value: Any) -> Any:
    """A value, or what stands for it: equal for values that are alike, different for objects that nobody
    knows.
    """
    if isinstance(value, list | tuple | set | frozenset):
        return type(value).__name__, *map(_plain, value)
    if isinstance(value, dict):
        return "dict", *((str(k), _plain(v)) for k, v in value.items())
    if value is None or isinstance(value, int | float | str | bool | torch.dtype):
        return value
    return type(value).__name__, id(value)


def short_copy(program: Iterable[Application], model: nn.Module) -> tuple[nn.Module, Run | None]:
    """A copy of the model with SHORT layers of its longest run, and that run; a whole copy and None without one."""
    run = longest_run(program, model)
    if run is None:
        return copy.deepcopy(model), None
    return shortened_copy(model, run), run


def shortened_copy(model: nn.Module, run: Run) -> nn.Module:
    """A copy of the model with SHORT layers of a run, without having copied the others."""
    layers: list[nn.Module] = list(model.get_submodule(run.container))  # type: ignore[call-overload]
    gone = range(run.first + SHORT - 1, run.first + run.count - 1)
    kept = {
        id(layer) for i, layer in enumerate(layers) if i not in gone
    }  # one layer may stand in many places
    memo: dict[int, Any] = {id(layers[i]): nn.Identity() for i in gone if id(layers[i]) not in kept}
    short = copy.deepcopy(model, memo)
    container = short.get_submodule(run.container)
    for _ in gone:
        del container[gone.start]  # type: ignore[operator]
    return short


def shorten(program: Program, model: nn.Module, run: Run, keep: int) -> Program:
    """Take all but the first `keep` - 1 layers and the last of the run out of the model, in place, and out of
    the program, which is returned anew.
    """
    container = model.get_submodule(run.container)
    gone, first_gone = run.count - keep, run.first + keep - 1
    for _ in range(gone):
        del container[first_gone]  # type: ignore[operator]
    prefix = f"{run.container}." if run.container else ""

    def renamed(path: str) -> str | None:
        if not path.startswith(prefix):
            return path
        head, dot, rest = path[len(prefix) :].partition(".")
        if not head.isdigit() or int(head) < first_gone:
            return path
        if int(head) < first_gone + gone:
            return None
        return f"{prefix}{int(head) - gone}{dot}{rest}"

    return dataclasses.replace(program, applications=tuple(_kept(program.applications, renamed)))


def _kept(applications: Iterable[Application], renamed: Callable[[str], str | None]) -> Iterable[Application]:
    for a in applications:
        module = renamed(a.module)
        if module is None:
            continue
        prefix = f"{a.module}." if a.module else ""
        new_prefix = f"{module}." if module else ""
        params = {}
        for name, placements in a.params.items():
            full = renamed(prefix + name)
            if full is not None:
                params[full[len(new_prefix) :]] = placements
        yield dataclasses.replace(a, module=module, params=params)


@dataclass(frozen=True)
class Look:
    """How `stretch` looks at an item: what it is apart from its layer, its layer, and the same item at
    another layer.
    """

    content: Callable[[Any], Any]
    index: Callable[[Any], int | None]
    moved: Callable[[Any, int], Any]


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
