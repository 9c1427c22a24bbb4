"""The arguments of a tiny model, with as many layers as it takes to have one of every kind.

A small model keeps the first layers. A layer that does something else, the sixth with a window or the one behind which the
forward keeps what it has, is lost where the small model has two. One forward of each model on meta tensors shows the operators in
and behind every layer: layers with the same operators are of one kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelizer.child.children import WorldError, in_children
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.workload import Workload
from parallelizer.proof.layer_watch import LayerStay, layer_stays

Path = tuple[str, ...]
"""The keys to an argument of the model."""

MOST_LAYERS = 12
"""Layers that the small model is given at most, so that one of every kind is among them."""

FEW = 4
"""Kinds that only sizes and constants tell apart are looked for up to this number: more is a constant that counts the layers."""


@dataclass(frozen=True, order=True)
class First:
    """The first layer of a kind, and how many layers a model must have that has one of it; `behind` says that the kind is of
    what runs behind the layer.
    """

    layer: int
    needed: int
    behind: bool = False


@dataclass(frozen=True)
class LayerKinds:
    """The layers of one list of modules: how many are called, and the first of each kind; in `exact` with layers told apart by
    sizes and constants too. What runs behind a layer is a kind of its own.
    """

    count: int
    kinds: Mapping[str, First]
    exact: Mapping[str, First]

    def missing_in(self, small: LayerKinds) -> list[First]:
        """The first of each kind of which the small model has no layer."""
        lost = {first for kind, first in self.kinds.items() if kind not in small.kinds}
        if len(small.exact) < len(self.exact) <= FEW:
            # Which is missing is not known, since all sizes differ. The layers that the small model has are its own first ones.
            lost |= {first for first in self.exact.values() if small.count < first.needed < self.count}
        return sorted(lost)


def with_every_kind(setup: Setup, tiny: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The `tiny` arguments with as many layers as it takes to have one of every kind, and in words the kinds that are lost."""
    numbers = _numbers(setup.model, tiny)
    if not numbers:
        return tiny, []
    model = setup.build_model()
    lengths = {len(m) for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    if not any(before in lengths for before, _ in numbers.values()):
        return tiny, []
    small_model = _small_model(setup, tiny)
    if small_model is None:
        return tiny, []
    large, small = layer_kinds([model, small_model], setup.workload)
    if large is None or small is None:
        return tiny, []
    lost = _lost(large, small)
    for path, (before, after) in numbers.items():
        counted = [name for name in lost if (large[name].count, small[name].count) == (before, after)]
        wanted = [f.needed for name in counted for f in lost[name] if f.needed <= MOST_LAYERS]
        if wanted:
            tiny = _replaced(tiny, path, max(after, *wanted))
    if any(lost.values()) and (small_model := _small_model(setup, tiny)) is not None:
        [small] = layer_kinds([small_model], setup.workload)
        lost = _lost(large, small) if small is not None else lost
    left = dict.fromkeys(
        _left_out(f"{name}.{first.layer}", first, small) for name, firsts in lost.items() for first in firsts
    )
    return tiny, list(left)


def _left_out(layer: str, first: First, small: Mapping[str, LayerKinds] | None) -> str:
    """What of the run the small model does not do."""
    name = layer.rpartition(".")[0]
    if first.behind:
        return f"what runs behind {layer} left out, nothing in the small model does the same"
    if small is not None and first.layer < small[name].count:
        return f"a part of {layer} left out, with its small sizes it runs other operators"
    return f"{layer} left out, no layer of the small model does the same"


def with_stages(setup: Setup, tiny: Mapping[str, Any], wanted: int) -> Mapping[str, Any]:
    """The `tiny` arguments with as many layers as it takes to cut the model into so many stages, as far as they go.

    The numbers of layers are those whole numbers among the model's arguments that make more modules for a cut to fall before
    when they grow by one. Lists with an entry for each layer continue from their beginning.
    """
    cuts = _cuts(setup, tiny)
    while cuts is not None and cuts < wanted:
        more = {
            path: (_cuts(setup, _grown(setup.model, tiny, path, 1)) or 0) - cuts
            for path in _counts(setup, tiny)
        }
        helping = {path: new for path, new in more.items() if new > 0}
        if not helping:
            break
        steps = math.ceil((wanted - cuts) / sum(helping.values()))
        larger = tiny
        for path in helping:
            larger = _grown(setup.model, larger, path, steps)
        before, cuts = cuts, _cuts(setup, larger)
        if cuts is None or cuts <= before:  # the model cannot be built so
            break
        tiny = larger
    return tiny


def _cuts(setup: Setup, tiny: Mapping[str, Any]) -> int | None:
    """How many modules of the small model a cut may fall before; None where it cannot be built."""
    small = _small_model(setup, tiny)
    if small is None:
        return None
    names = list(dict(small.named_modules()))
    rules = (rule for rule in setup.plan.rules if any(use.style == "stage" for use in rule.uses))
    return len({name for rule in rules for name in rule.glob.select(names)})


def _counts(setup: Setup, tiny: Mapping[str, Any]) -> list[Path]:
    """The arguments of the small model that may be numbers of layers: those that are as many as the modules of a list, and those
    that `tiny` makes smaller.
    """
    small = _small(setup, tiny)
    lengths = {len(m) for m in small.build_model().modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    whole = [path for path, value in _whole_numbers(small.model) if value in lengths]
    return list(dict.fromkeys([*_numbers(setup.model, tiny), *whole]))


def _whole_numbers(arguments: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, int]]:
    for key, value in arguments.items():
        if isinstance(value, Mapping) and key != "tiny":
            yield from _whole_numbers(value, (*prefix, key))
        elif type(value) is int:
            yield (*prefix, key), value


def _grown(written: Mapping[str, Any], tiny: Mapping[str, Any], path: Path, steps: int) -> Mapping[str, Any]:
    """The `tiny` arguments with a number of layers that is greater by `steps`."""
    around: Any = merged(written, tiny)[0]
    for key in path[:-1]:
        around = around[key]
    before = around[path[-1]]
    tiny = _replaced(tiny, path, before + steps)
    for key, value in around.items():
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == before > 0:
            longer = [value[at % before] for at in range(before + steps)]
            tiny = _replaced(tiny, (*path[:-1], key), longer)
    return tiny


def _small(setup: Setup, tiny: Mapping[str, Any]) -> Setup:
    return dataclasses.replace(setup, model=merged(setup.model, tiny)[0])


def _lost(large: Mapping[str, LayerKinds], small: Mapping[str, LayerKinds]) -> dict[str, list[First]]:
    return {name: kinds.missing_in(small[name]) for name, kinds in large.items() if name in small}


def _small_model(setup: Setup, tiny: Mapping[str, Any]) -> nn.Module | None:
    try:
        return _small(setup, tiny).build_model()
    except PlanError:  # so few or so many layers it cannot be built with
        return None


def layer_kinds(models: Sequence[nn.Module], workload: Workload) -> list[dict[str, LayerKinds] | None]:
    """The kinds of layers in every list of modules, by its path, from one forward of each model, which is on meta and left as it
    is. None for a model that does not run so: values decide its course, or an operator has no meta kernel.
    """
    try:
        found = in_children([(layer_stays, model, workload) for model in models])
    except WorldError:
        return [None] * len(models)
    return [None if stays is None else _kinds(stays) for stays in found]


def _kinds(all_stays: Sequence[LayerStay]) -> dict[str, LayerKinds]:
    found: dict[str, LayerKinds] = {}
    for container in dict.fromkeys(stay.container for stay in all_stays):
        stays = [stay for stay in all_stays if stay.container == container]
        kinds: dict[str, First] = {}
        exact: dict[str, First] = {}
        for stay in stays:
            last = stay is stays[-1]
            inside, behind = (_digest(part, 1) for part in (stay.inside, stay.behind))
            first = First(stay.index, stay.index + 1)
            kinds.setdefault(f"inside {inside}", first)
            exact.setdefault(_digest(stay.inside, 2), first)
            # Behind the last layer the model goes on, so that what runs between two layers needs one more.
            following = First(stay.index, stay.index + (1 if last else 2), behind=True)
            kinds.setdefault(f"{'end' if last else 'between'} {behind}", following)
        found[container] = LayerKinds(len({stay.index for stay in stays}), kinds, exact)
    return found


def _digest(operators: list[tuple[str, ...]], facts: int) -> str:
    """Of operators alone, or with their second fact, sizes and constants, too."""
    text = repr([operator[:facts] for operator in operators])
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _numbers(
    written: Mapping[str, Any], tiny: Mapping[str, Any], prefix: Path = ()
) -> dict[Path, tuple[int, int]]:
    """The whole numbers that `tiny` makes smaller, by their keys: before and after."""
    found: dict[Path, tuple[int, int]] = {}
    for key, after in tiny.items():
        before = written.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found |= _numbers(before, after, (*prefix, key))
        elif type(before) is int and type(after) is int and before > after:
            found[*prefix, key] = (before, after)
    return found


def _replaced(tiny: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    head, *rest = path
    return {**tiny, head: _replaced(tiny.get(head, {}), tuple(rest), value) if rest else value}


def merged(
    written: Mapping[str, Any], tiny: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The arguments with the tiny ones in their place, maps inside of them key by key, and what that changes."""
    result, changes = dict(written), []
    for key, value in tiny.items():
        before = written.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[key], inside = merged(before, value, f"{prefix}{key}.")
            changes += inside
        else:
            result[key] = value
            if before != value:
                changes.append(f"{prefix}{key} {before} -> {value}")
    return result, changes
