"""Equal layers of a model, and a shorter model in which one layer stands for many.

Code that runs a whole model (a trace, a followed step, an observed forward) runs this shorter copy if the
layers are equal.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer.styles.application import Application, Program
from parallelizer.torch_private import has_empty_child

SHORT = 3
"""Layers of the shorter model: a first, a last and one between them, since FSDP treats the ends
differently.
"""


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


WORTH_IT = 2 * SHORT + 2
"""Layers from which tracing two short models costs less than the whole one."""


WORTH_ANOTHER = 2 * SHORT + 4
"""Layers of a further run from which one more short model costs less than tracing these layers in all of them."""


def longest_run(program: Iterable[Application], model: nn.Module, least: int = WORTH_IT) -> Run | None:
    """The longest run of at least so many equal layers; by default of so many that two short models cost less to trace."""
    runs = _runs(program, model, least)
    return max(runs, key=lambda run: run.count, default=None)  # the first of equal ones


def runs_of(program: Iterable[Application], model: nn.Module) -> tuple[Run, ...]:
    """The runs whose layers are worth not to be traced, each in a short model of its own: the longest first."""
    runs = sorted(_runs(program, model, WORTH_IT), key=lambda run: -run.count)
    return tuple(run for at, run in enumerate(runs) if at == 0 or run.count >= WORTH_ANOTHER)


def _runs(program: Iterable[Application], model: nn.Module, least: int) -> Iterator[Run]:
    """The runs of at least so many equal layers, in the order of the model's modules. Lists inside of equal layers have none."""
    found: list[Run] = []
    styles: dict[str, list[Facts]] = {}
    for a in program:
        styles.setdefault(a.module, []).append(
            (a.slot, a.style, a.axes, a.rule.key, str(sorted(a.options.items(), key=str)))
        )
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or has_empty_child(module):
            continue  # a list may hold None
        if any(run.split(path)[1] is not None for run in found):
            continue
        first = 0
        for _, group in itertools.groupby(_signatures(module, f"{path}." if path else "", styles)):
            count = len(list(group))
            if count >= least:
                found.append(Run(path, first, count))
                yield found[-1]
            first += count


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
    """A value, or what stands for it: equal for values that are alike, different for unknown
    objects.
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


def shorten_runs(program: Program, model: nn.Module, runs: Sequence[Run], keeps: Sequence[int]) -> Program:
    """As `shorten`, for several runs."""
    for run, keep in sorted(
        zip(runs, keeps, strict=True), key=lambda pair: -pair[0].first
    ):  # so that `first` holds
        program = shorten(program, model, run, keep)
    return program


def shorten(program: Program, model: nn.Module, run: Run, keep: int) -> Program:
    """Take all but the first `keep` - 1 layers and the last of the run out of the model, in place, and out of
    the program, which is returned anew.
    """
    container = model.get_submodule(run.container)
    for _ in range(run.count - keep):
        del container[run.first + keep - 1]  # type: ignore[operator]
    return shortened(program, run, keep)


def shortened(program: Program, run: Run, keep: int) -> Program:
    """The program of a model with the first `keep` - 1 layers of a run and the last: see `shorten`."""
    gone, first_gone = run.count - keep, run.first + keep - 1
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
