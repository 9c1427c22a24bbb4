"""Watches one forward: the calls of units, and the values that go from one to the next through the glue between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from parallelizer.compiler.observe import calling
from parallelizer.compiler.observe.made_up_counts import ROWS, made_up, without_masks
from parallelizer.compiler.observe.remembered_results import RememberedResults
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.compiler.pipeline.left_behind import Behind, Call
from parallelizer.compiler.pipeline.unit_calls import Draw, Need, UnitCall
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.pipeline.stages import UnitOutput
from parallelizer.language.plan import full_name
from parallelizer.torch_private import storage_key, tree_leaves, tree_map_where


@dataclass
class _Running:
    """The unit that is running."""

    unit: str
    index: int
    place: int
    has_parameters: bool
    needs: frozenset[Need]
    span: Span | None
    flops: int = 0
    bytes: int = 0

    @property
    def call(self) -> Call:
        return self.unit, self.index, self.place


@dataclass
class _Taints:
    """Which values each tensor was computed from, by its storage, and which values lie in it. The tensors are held, so that
    no storage is used anew.
    """

    by_storage: dict[int, frozenset[Need]] = field(default_factory=dict)
    made: dict[int, set[UnitOutput]] = field(default_factory=dict)
    held: list[torch.Tensor] = field(default_factory=list)

    def of(self, value: Any) -> frozenset[Need]:
        if not isinstance(value, torch.Tensor):
            return frozenset()
        return self.by_storage.get(storage_key(value), frozenset())

    def set(self, value: torch.Tensor, taint: frozenset[Need]) -> None:
        self.by_storage[storage_key(value)] = taint
        self.held.append(value)


class UnitWatch(RememberedResults):
    """Notes the calls of units, and follows values through the glue between them."""

    def __init__(
        self, model: nn.Module, candidates: Sequence[str], units: Sequence[str], rows: int = ROWS
    ) -> None:
        super().__init__()
        self.rows = rows
        self.counted = False
        """Whether the shape of a tensor depended on values, in the place of which `rows` stood."""
        self.shapes: dict[UnitOutput, torch.Size] = {}
        self.calls: list[UnitCall] = []
        self.begun: list[str] = []
        self.opened: set[str] = set()
        self.strays: list[tuple[str, str]] = []
        self.rewritten: set[UnitOutput] = set()
        self.taints = _Taints()
        self.behind = Behind()
        self.kept = {storage_key(t) for t in (*model.parameters(), *model.buffers())}
        self.candidates = set(candidates)
        self.bound: set[Need] = set()
        self.draws = 0
        self.seen: dict[str, int] = {}
        self.running: _Running | None = None
        self.giving_on = False
        self.owners = {
            id(param): (name, _unit_around(path, units))
            for path, module in model.named_modules()
            for name, param in (
                (full_name(path, n), p)
                for n, p in module.named_parameters(recurse=False, remove_duplicate=False)
            )
        }
        self.handles: list[Any] = []
        for path, module in model.named_modules():
            unit = _unit_around(path, units)
            if path == unit:
                enter, leave = self._enter(path, _has_parameters(module)), self._leave(path)
                self.handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                self.handles.append(module.register_forward_hook(leave))
            elif unit is not None:
                self.handles.append(module.register_forward_pre_hook(self._inside(unit), prepend=True))
            elif path in self.candidates:
                self.handles.append(module.register_forward_pre_hook(self._begins(path), prepend=True))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def taint_of(self, value: Any) -> frozenset[Need]:
        """The values that a tensor depends on."""
        return self.taints.of(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.giving_on:
            return func(*args, **(kwargs or {}))
        given, args = args, without_masks(func, args, self.rows)
        made = made_up(func, args, self.rows)
        self.counted = self.counted or args is not given or made is not None
        output = self.result(func, args, kwargs or {}) if made is None else made
        running, returned = self.running, [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        if running is not None:
            count = flop_registry.get(func.overloadpacket)
            if count is not None:
                running.flops += int(count(*args, **(kwargs or {}), out_val=output))
            running.bytes += sum(t.numel() * t.element_size() for t in returned)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [t for t in _written(func, args) if storage_key(t) not in self.kept]
        self.behind.read(running.call if running is not None else None, len(self.begun), read)
        if running is None:
            self.rewritten.update(*(self.taints.made.get(storage_key(t), ()) for t in written))
        else:
            self.behind.made(running.call, read, returned, written)
        if running is None or not running.has_parameters:
            taint = frozenset[Need]().union(*map(self.taints.of, read), *self._needs_of_parameters(read))
            if torch.Tag.nondeterministic_seeded in func.tags:
                taint |= {Draw(func.overloadpacket.__name__, self.draws)}
                self.draws += 1
            if taint:
                for tensor in returned:
                    self.taints.set(tensor, taint | self.taints.of(tensor))
        return output

    def _needs_of_parameters(self, given: Sequence[torch.Tensor]) -> Iterator[frozenset[Need]]:
        """Those among tensors that glue reads. One that a unit returned came by the unit's call."""
        for tensor in given:
            if id(tensor) in self.owners and not any(
                isinstance(t, UnitOutput) for t in self.taints.of(tensor)
            ):
                name, unit = self.owners[id(tensor)]
                if unit is not None:
                    self.strays.append((unit, name))
                self.bound.add(name)
                yield frozenset({name})

    def _begins(self, path: str) -> Any:
        def hook(*_: Any) -> None:
            if path in self.candidates and path not in self.begun:
                self.begun.append(path)

        return hook

    def _inside(self, unit: str) -> Any:
        def hook(*_: Any) -> None:
            if self.running is None:
                self.opened.add(unit)

        return hook

    def _enter(self, path: str, has_parameters: bool) -> Any:
        begins = self._begins(path)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            begins()
            needs = frozenset[Need]().union(*(self.taints.of(t) for t in tree_leaves((args, kwargs))))
            index = self.seen[path] = self.seen.get(path, -1) + 1
            span = written_here(within=calling.__file__)
            self.running = _Running(path, index, len(self.begun), has_parameters, needs, span)

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            running = self.running
            if running is None or running.unit != path:
                return None
            self.running = None
            leaves = tree_leaves(output)
            self.behind.returned(running.call, (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
            needs = running.needs
            if not running.has_parameters:  # what it read itself, a closure's tensors too
                needs = needs.union(*map(self.taints.of, leaves))
            free = not running.has_parameters and not needs & self.bound
            place = len(self.begun)
            self.calls.append(
                UnitCall(path, running.index, place, needs, free, running.flops, running.bytes, running.span)
            )
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    value = UnitOutput(path, running.index, at)
                    self.shapes[value] = leaf.shape
                    self.taints.set(leaf, frozenset({value}))
                    self.taints.made.setdefault(storage_key(leaf), set()).add(value)
                    if not free:
                        self.bound.add(value)
            return tree_map_where(torch.Tensor, self._given_on, output)

        return hook

    def _given_on(self, leaf: torch.Tensor) -> torch.Tensor:
        """A returned tensor as another one with its storage, if the unit made it and may have kept it."""
        if id(leaf) not in self.behind.inside:
            return leaf
        self.giving_on = True
        try:
            return leaf.view_as(leaf)
        finally:
            self.giving_on = False


def _written(func: Any, args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator changes in place, as far as it takes them by position."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def _unit_around(path: str, units: Sequence[str]) -> str | None:
    return next((u for u in units if path == u or path.startswith(f"{u}.")), None)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
