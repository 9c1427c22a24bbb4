"""What crosses between the modules of a model, found by following one forward on the meta device.

A *unit* is a module that no cut divides. The modules around cuts are *divided*: their own code, the glue, runs on
every stage. The survey notes each call of a unit, in order, and which values it needs: tensors that other units
returned and that reach it through glue alone. Parameters that glue reads are noted by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.calling import call
from parallelizer.compiler.observe.made_up_counts import ROWS, made_up, without_masks
from parallelizer.language.pipeline.stages import UnitOutput
from parallelizer.language.plan import full_name
from parallelizer.language.workload import Workload
from parallelizer.torch_private import TorchDispatchMode, storage_key, tree_leaves, version


@dataclass(frozen=True)
class Draw:
    """Random numbers that glue, or a module that every stage can run, draws: the `number`-th draw of the forward."""

    operator: str
    number: int


Need = UnitOutput | Draw | str
"""A value, random numbers, or the name of a parameter."""


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit. `place` is the number of cuts that could lie before it. It is `free` if it has no parameters and
    nothing that it reads depends on any: each stage can run it. `flops` are those of its forward, `bytes` the size of
    all tensors that its operators return.
    """

    unit: str
    index: int
    place: int
    needs: frozenset[Need]
    free: bool
    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Survey:
    """All calls in order, the values that the model's output needs, the modules before which a cut may lie in the order
    of the forward, and the divided modules. `strays` are modules of which glue reads a parameter, with its name: they are divided
    for that. `updated` are the persistent buffers that the forward writes to, `rewritten` the outputs of units that glue writes
    to in place, `varying` those whose shape depends on values of tensors.
    """

    calls: tuple[UnitCall, ...]
    output: frozenset[Need]
    candidates: tuple[str, ...]
    divided: frozenset[str]
    strays: tuple[tuple[str, str], ...] = ()
    updated: tuple[str, ...] = ()
    rewritten: frozenset[UnitOutput] = frozenset()
    varying: frozenset[UnitOutput] = frozenset()


def survey(model: nn.Module, candidates: Sequence[str], workload: Workload) -> Survey | str:
    """Follow one forward of `model`, which is on meta and left as it is, in a child of this process.

    A cut may lie before each of `candidates`. Returns the reason, as text, if the model does not run so.
    """
    try:
        [found] = in_children([(_survey, model, tuple(candidates), workload)])
    except WorldError as error:
        return str(error).strip().splitlines()[-1]
    result: Survey = found
    return result


def divided_by(modules: Mapping[str, nn.Module], candidates: Sequence[str]) -> set[str]:
    """The modules that a cut before any of the candidates divides: all around them."""
    return {"", *(path[:at] for path in candidates for at in _dots(path))} & set(modules)


def units_of(modules: Mapping[str, nn.Module], divided: set[str]) -> list[str]:
    """The outermost modules that are not divided. A list of modules is no unit, since nobody calls it."""
    found: list[str] = []
    for path, module in modules.items():
        parent = path.rpartition(".")[0]
        if path and path not in divided and parent in divided:
            if type(module).forward is nn.Module.forward:
                divided.add(path)  # its children come behind it
            else:
                found.append(path)
    return found


def _survey(model: nn.Module, candidates: tuple[str, ...], workload: Workload) -> Survey:
    model.to("meta")
    modules = dict(model.named_modules())
    divided = divided_by(modules, candidates)
    batch = workload.example(2, workload.seq_len, "meta")
    strays: dict[tuple[str, str], None] = {}
    while True:
        before = _versions(model)
        units = units_of(modules, divided)
        watch = _UnitWatch(model, candidates, units)
        output = _followed(watch, model, batch)
        read = {path for unit, name in watch.strays for path in _from_unit(unit, name)}
        if not watch.opened and not read:
            break
        strays |= dict.fromkeys(watch.strays)
        divided |= (
            watch.opened | read
        )  # what is in it was called or read from outside, so its parts are units
    needs = frozenset[Need]().union(*(watch.taint_of(t) for t in tree_leaves(output)))
    updated = tuple(_updated(before, model))
    other = _UnitWatch(model, candidates, units, rows=ROWS + 1)
    _followed(other, model, batch)
    varying = frozenset(value for value, shape in watch.shapes.items() if other.shapes.get(value) != shape)
    return Survey(
        tuple(watch.calls),
        needs,
        tuple(watch.begun),
        frozenset(divided),
        tuple(strays),
        updated,
        frozenset(watch.rewritten),
        varying,
    )


def _followed(watch: _UnitWatch, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """The output of one forward under the watch."""
    try:
        with watch, torch.no_grad():
            return call(model, batch)
    finally:
        watch.remove()


def _versions(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """The persistent buffers by name, each with the number of writes to it."""
    persistent = model.state_dict(keep_vars=True)
    return {name: (buffer, version(buffer)) for name, buffer in model.named_buffers() if name in persistent}


def _updated(before: Mapping[str, tuple[torch.Tensor, int]], model: nn.Module) -> Iterator[str]:
    """The names of buffers that were written to or replaced."""
    after = _versions(model)
    for name, (buffer, writes) in before.items():
        if name not in after or after[name][0] is not buffer or after[name][1] != writes:
            yield name


@dataclass
class _Running:
    """The unit that is running."""

    unit: str
    index: int
    has_parameters: bool
    needs: frozenset[Need]
    flops: int = 0
    bytes: int = 0


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


class _UnitWatch(TorchDispatchMode):
    """Notes the calls of units, and follows values through the glue between them."""

    def __init__(
        self, model: nn.Module, candidates: Sequence[str], units: Sequence[str], rows: int = ROWS
    ) -> None:
        super().__init__()
        self.rows = rows
        self.shapes: dict[UnitOutput, torch.Size] = {}
        self.calls: list[UnitCall] = []
        self.begun: list[str] = []
        self.opened: set[str] = set()
        self.strays: list[tuple[str, str]] = []
        self.rewritten: set[UnitOutput] = set()
        self.taints = _Taints()
        self.candidates = set(candidates)
        self.bound: set[Need] = set()
        self.draws = 0
        self.seen: dict[str, int] = {}
        self.running: _Running | None = None
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
        args = without_masks(func, args, self.rows)
        made = made_up(func, args, self.rows)
        output = func(*args, **(kwargs or {})) if made is None else made
        running, returned = self.running, [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        if running is not None:
            count = flop_registry.get(func.overloadpacket)
            if count is not None:
                running.flops += int(count(*args, **(kwargs or {}), out_val=output))
            running.bytes += sum(t.numel() * t.element_size() for t in returned)
        if running is None:
            self.rewritten.update(*(self.taints.made.get(storage_key(t), ()) for t in _written(func, args)))
        if running is None or not running.has_parameters:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            taint = frozenset[Need]().union(*map(self.taints.of, given), *self._needs_of_parameters(given))
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
            self.running = _Running(path, index, has_parameters, needs)

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            running = self.running
            if running is None or running.unit != path:
                return
            self.running = None
            leaves = tree_leaves(output)
            needs = running.needs
            if not running.has_parameters:  # what it read itself, a closure's tensors too
                needs = needs.union(*map(self.taints.of, leaves))
            free = not running.has_parameters and not needs & self.bound
            place = len(self.begun)
            self.calls.append(UnitCall(path, running.index, place, needs, free, running.flops, running.bytes))
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    value = UnitOutput(path, running.index, at)
                    self.shapes[value] = leaf.shape
                    self.taints.set(leaf, frozenset({value}))
                    self.taints.made.setdefault(storage_key(leaf), set()).add(value)
                    if not free:
                        self.bound.add(value)

        return hook


def _written(func: Any, args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator changes in place, as far as it takes them by position."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def _unit_around(path: str, units: Sequence[str]) -> str | None:
    return next((u for u in units if path == u or path.startswith(f"{u}.")), None)


def _from_unit(unit: str, name: str) -> list[str]:
    """The modules from a unit down to the one that has a parameter."""
    path = name.rpartition(".")[0]
    return [path[:at] for at in (*_dots(path), len(path)) if len(path[:at]) >= len(unit)]


def _dots(path: str) -> list[int]:
    return [at for at, letter in enumerate(path) if letter == "."]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
