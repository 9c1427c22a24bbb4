"""What crosses between the modules of a model, found by following one forward on the meta device.

A *unit* is a module that no cut divides. The modules around cuts are *divided*: their own code, the glue, runs on
every stage. The survey notes each call of a unit, in order, and which values it needs: tensors that other units
returned and that reach it through glue alone. Parameters that glue reads are noted by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.calling import call
from parallelizer.compiler.observe.made_up_counts import ROWS
from parallelizer.compiler.observe.users_code import written_at
from parallelizer.compiler.pipeline.left_behind import LeftBehind
from parallelizer.compiler.pipeline.unit_calls import Need, UnitCall
from parallelizer.compiler.pipeline.unit_watch import UnitWatch
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.pipeline.stages import UnitOutput
from parallelizer.language.workload import Workload
from parallelizer.torch_private import GroupedProducts, tree_leaves, version


@dataclass(frozen=True)
class Survey:
    """All calls in order, the values that the model's output needs, the modules before which a cut may lie in the order
    of the forward, and the divided modules. `strays` are modules of which glue reads a parameter, with its name: they are divided
    for that. `updated` are the persistent buffers that the forward writes to, `rewritten` the outputs of units that glue writes
    to in place, `varying` those whose shape depends on values of tensors. `left_behind` are tensors that units hand on
    otherwise than by what they return.
    """

    calls: tuple[UnitCall, ...]
    output: frozenset[Need]
    candidates: tuple[str, ...]
    divided: frozenset[str]
    strays: tuple[tuple[str, str], ...] = ()
    updated: tuple[str, ...] = ()
    rewritten: frozenset[UnitOutput] = frozenset()
    varying: frozenset[UnitOutput] = frozenset()
    left_behind: tuple[LeftBehind, ...] = ()


@dataclass(frozen=True)
class NotFollowed:
    """Why a model does not run on tensors without values, and the line of its code that fails."""

    reason: str
    span: Span | None = None


def survey(model: nn.Module, candidates: Sequence[str], workload: Workload) -> Survey | NotFollowed:
    """Follow one forward of `model`, which is on meta and left as it is, in a child of this process.

    A cut may lie before each of `candidates`.
    """
    try:
        [found] = in_children([(_survey, model, tuple(candidates), workload)])
    except WorldError as error:
        return NotFollowed(str(error).strip().splitlines()[-1])
    result: Survey | NotFollowed = found
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


def _survey(model: nn.Module, candidates: tuple[str, ...], workload: Workload) -> Survey | NotFollowed:
    try:
        return _surveyed(model, candidates, workload)
    except Exception as error:  # the model's own
        lines = str(error).strip().splitlines()
        return NotFollowed(": ".join([type(error).__name__, *lines[:1]]), written_at(error))


def _surveyed(model: nn.Module, candidates: tuple[str, ...], workload: Workload) -> Survey:
    model.to("meta")
    modules = dict(model.named_modules())
    divided = divided_by(modules, candidates)
    batch = workload.example(2, workload.seq_len, "meta")
    strays: dict[tuple[str, str], None] = {}
    while True:
        before = _versions(model)
        units = units_of(modules, divided)
        watch = UnitWatch(model, candidates, units)
        output = _followed(watch, model, batch)
        read = {path for unit, name in watch.strays for path in _from_unit(unit, name)}
        if not watch.opened and not read:
            break
        strays |= dict.fromkeys(watch.strays)
        divided |= (
            watch.opened | read
        )  # what is in it was called or read from outside, so its parts are units
    leaves = tree_leaves(output)
    needs = frozenset[Need]().union(*(watch.taint_of(t) for t in leaves))
    watch.behind.read(None, len(watch.begun), (t for t in leaves if isinstance(t, torch.Tensor)))
    updated = tuple(_updated(before, model))
    varying = frozenset[UnitOutput]()
    if watch.counted:
        other = UnitWatch(model, candidates, units, rows=ROWS + 1)
        _followed(other, model, batch)
        varying = frozenset(v for v, shape in watch.shapes.items() if other.shapes.get(v) != shape)
    return Survey(
        tuple(watch.calls),
        needs,
        tuple(watch.begun),
        frozenset(divided),
        tuple(strays),
        updated,
        frozenset(watch.rewritten),
        varying,
        tuple(watch.behind.found.values()),
    )


def _followed(watch: UnitWatch, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """The output of one forward under the watch."""
    try:
        with GroupedProducts(), watch, torch.no_grad():
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


def _from_unit(unit: str, name: str) -> list[str]:
    """The modules from a unit down to the one that has a parameter."""
    path = name.rpartition(".")[0]
    return [path[:at] for at in (*_dots(path), len(path)) if len(path[:at]) >= len(unit)]


def _dots(path: str) -> list[int]:
    return [at for at, letter in enumerate(path) if letter == "."]
