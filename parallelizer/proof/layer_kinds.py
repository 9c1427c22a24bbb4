"""Whether a small model has a layer of every kind that the large one has.

A small model keeps the first layers. A layer that does something else, the sixth with a window or the one behind which the
forward keeps what it has, is lost where the small model has two. One forward of each model on meta tensors shows the operators in
and behind every layer: layers with the same operators are of one kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.calling import call
from parallelizer.compiler.observe.remembered_results import RememberedResults
from parallelizer.compiler.observe.running_module import Running
from parallelizer.language.workload import Workload
from parallelizer.torch_private import tree_leaves

FEW = 4
"""Kinds that only sizes and constants tell apart are looked for up to this number: more is a constant that counts the layers."""


@dataclass(frozen=True, order=True)
class First:
    """The first layer of a kind, and how many layers a model must have that has one of it."""

    layer: int
    needed: int


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


def layer_kinds(model: nn.Module, workload: Workload) -> dict[str, LayerKinds] | None:
    """The kinds of layers in every list of modules, by its path, from one forward of `model`, which is on meta and left as it is.
    None when it does not run so: values decide its course, or an operator has no meta kernel.
    """
    try:
        (kinds,) = in_children([(_layer_kinds, model, workload)])
    except WorldError:
        return None
    result: dict[str, LayerKinds] | None = kinds
    return result


def _layer_kinds(model: nn.Module, workload: Workload) -> dict[str, LayerKinds] | None:
    watch = _LayerWatch(model)
    try:
        with torch.device("meta"), torch.no_grad(), watch:
            call(model, workload.example(1, workload.seq_len, "meta"))
    except Exception:  # whatever somebody's forward raises: the trace tells it
        return None
    return watch.kinds()


@dataclass
class _Stay:
    """One call of a layer, and what runs behind it."""

    container: str
    index: int
    inside: list[tuple[str, ...]] = field(default_factory=list)
    behind: list[tuple[str, ...]] = field(default_factory=list)


class _LayerWatch(RememberedResults):
    """Notes every operator, by the layer that it runs in or behind."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running = Running(model)
        self.lists = {
            path for path, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and path
        }
        self.stays: list[_Stay] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.result(func, args, kwargs or {})
        layer = self._layer()
        constants = [x for x in tree_leaves((args, kwargs)) if not isinstance(x, torch.Tensor)]
        shapes = [tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if layer is None:
            if self.stays:
                self.stays[-1].behind.append((str(func), repr((constants, shapes))))
            return result
        container, index, path = layer
        if (
            not self.stays
            or (self.stays[-1].container, self.stays[-1].index) != (container, index)
            or self.stays[-1].behind
        ):
            self.stays.append(_Stay(container, index))
        self.stays[-1].inside.append((f"{func} in {path}", repr((constants, shapes))))
        return result

    def kinds(self) -> dict[str, LayerKinds]:
        found: dict[str, LayerKinds] = {}
        for container in dict.fromkeys(stay.container for stay in self.stays):
            stays = [stay for stay in self.stays if stay.container == container]
            kinds: dict[str, First] = {}
            exact: dict[str, First] = {}
            for stay in stays:
                last = stay is stays[-1]
                inside, behind = (_digest(part, 1) for part in (stay.inside, stay.behind))
                first = First(stay.index, stay.index + 1)
                kinds.setdefault(f"inside {inside}", first)
                exact.setdefault(_digest(stay.inside, 2), first)
                # Behind the last layer the model goes on, so that what runs between two layers needs one more.
                between = First(stay.index, stay.index + 2)
                kinds.setdefault(f"end {behind}" if last else f"between {behind}", first if last else between)
            found[container] = LayerKinds(len({stay.index for stay in stays}), kinds, exact)
        return found

    def _layer(self) -> tuple[str, int, str] | None:
        """The outermost list that the running module lies in, its layer's index, and the path from there."""
        parts = self.running.current.split(".")
        for end in range(1, len(parts)):
            container = ".".join(parts[:end])
            if container in self.lists and parts[end].isdigit():
                return container, int(parts[end]), ".".join(parts[end + 1 :])
        return None


def _digest(operators: list[tuple[str, ...]], facts: int) -> str:
    """Of operators alone, or with their second fact, sizes and constants, too."""
    text = repr([operator[:facts] for operator in operators])
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
