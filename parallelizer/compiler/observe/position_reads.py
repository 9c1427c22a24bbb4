"""Where a model's forward gets positions from: tensors that it makes from the sequence's length, and tables
that it reads by position.

The model runs once on the meta device, on a sequence of a length that no dimension of the model has. Tensors
that are made from that length, or cut to it, are followed from function to function until they meet an
activation. Names do not matter. A position that never meets an activation has no effect and is not reported.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from parallelizer.compiler.observe.calling import inputs_of
from parallelizer.compiler.observe.equal_layers import Run, short_copy
from parallelizer.compiler.observe.running_module import Running
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Workload
from parallelizer.styles.application import Application
from parallelizer.torch_private import GroupedProducts

LENGTHS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 7, 5, 3)
"""Lengths of a sequence that dimensions of models seldom have; short, because a table may be."""

_MAKERS = (torch.arange, torch.linspace)
_SHAPERS = (torch.tril, torch.triu, torch.Tensor.tril, torch.Tensor.triu)
_RUNNING = (torch.cumsum, torch.Tensor.cumsum, torch.cumprod, torch.Tensor.cumprod)
_LOOKED_UP = (torch.gather, torch.Tensor.gather)
"""What is read by positions with these are values of a table, and no positions of another."""
_CUTS = (
    torch.Tensor.__getitem__,
    torch.narrow,
    torch.Tensor.narrow,
    torch.index_select,
    torch.Tensor.index_select,
)


@dataclass(frozen=True)
class PositionSource:
    """What tells tokens their positions. `kind` is `made` (by the function `name`), `buffer` or `parameter` (the
    model's, read along `dim`, which has `rows` of them); `module` is where that happens, and `written` the line of the
    model, if it is made.
    """

    kind: str
    name: str
    module: str
    dim: int | None = None
    rows: int | None = None
    written: Span | None = field(default=None, compare=False, repr=False)


def position_sources(
    model: nn.Module,
    workload: Workload,
    given: Sequence[str] = (),
    applications: Iterable[Application] = (),
) -> tuple[PositionSource, ...]:
    """What gives positions to the activations of one forward, each once, in order of execution.

    `given` are batch entries that hold positions. Of equal layers under equal `applications` a few stand for
    all. The model is on meta and left as it is. Nothing is found in a model that does not run there, or runs
    at special lengths only.
    """
    length = _length(model, workload)
    if length is None:
        return ()
    made = {name: torch.empty(2, length, dtype=torch.int64, device="meta") for name in given}
    batch = inputs_of(model, made | workload.example(2, length, "meta"))
    short, run = short_copy(applications, model)
    used = used_positions(short, batch, length, given)
    if used is None and run is not None:  # a forward may count its layers
        used = used_positions(copy.deepcopy(model), batch, length, given)
        run = None
    if run is None:
        return tuple(used or ())
    return tuple(each for source in used or () for each in _in_every_layer(source, run))


def used_positions(
    model: nn.Module, batch: Mapping[str, torch.Tensor], length: int, given: Iterable[str]
) -> list[PositionSource] | None:
    """What one forward uses; None when it does not run. Its forward may leave things behind in the model."""
    watch = _PositionWatch(model, length)
    watch.adopt(batch, given)
    try:
        with (
            torch.no_grad(),
            redirect_stdout(sys.stderr),
            GroupedProducts(),
            watch,
        ):  # what it prints is no answer of ours
            model(**batch)
    except (Exception, SystemExit):
        # What keeps a model from running is the trace's to tell; here it means that nothing is known.
        return None
    finally:
        watch.running.remove()
    return list(watch.used)


def _in_every_layer(source: PositionSource, run: Run) -> Iterator[PositionSource]:
    modules = list(run.stands_for(source.module))
    names = list(run.stands_for(source.name)) if source.kind in ("buffer", "parameter") else [source.name]
    for index in range(max(len(modules), len(names))):
        module, name = modules[min(index, len(modules) - 1)], names[min(index, len(names) - 1)]
        yield dataclasses.replace(source, module=module, name=name)


def _length(model: nn.Module, workload: Workload) -> int | None:
    """A length that can be told from every other size."""
    tensors = (*model.parameters(), *model.buffers())
    sizes = {size for tensor in tensors for size in tensor.shape}
    sizes |= {n for entry in workload.entries.values() for n in entry.shape if isinstance(n, int)}
    return next((n for n in LENGTHS if n <= workload.seq_len and n not in sizes), None)


class _PositionWatch(TorchFunctionMode):
    """Follows positions and activations through one forward."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.length = length
        self.running = Running(model)
        self.positions: dict[int, frozenset[PositionSource]] = {}
        self.activations: set[int] = set()
        self.tables: dict[int, tuple[str, str]] = {}
        self.values: set[int] = set()
        self.used: dict[PositionSource, None] = {}
        self.held: list[torch.Tensor] = []  # so that nothing else gets an id
        for kind, named in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
            self.tables.update({id(tensor): (kind, name) for name, tensor in named})

    def adopt(self, batch: Mapping[str, torch.Tensor], given: Iterable[str]) -> None:
        """Take note of what the forward begins with."""
        for name, tensor in batch.items():
            if name in given:
                self.positions[id(tensor)] = frozenset({PositionSource("given", name, "")})
            else:
                self.activations.add(id(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        taken = [*_tensors(args), *_tensors(kwargs.values())]
        made = list(_tensors((result,)))
        if not made:
            return result
        sources = frozenset().union(*(self.positions.get(id(t), frozenset()) for t in taken))
        active = any(id(t) in self.activations for t in taken)
        new = [*self._made(func, taken, made[0], active), *self._read(func, taken, made[0], sources)]
        sources |= frozenset(new)
        if active and sources:
            self.used.update(dict.fromkeys(s for s in sorted(sources, key=str) if s not in self.used))
            sources = frozenset()  # from here on it is an activation like any other
        for tensor in made:
            self.held.append(tensor)
            if sources:
                self.positions[id(tensor)] = sources
            if active:
                self.activations.add(id(tensor))
            if func in _LOOKED_UP or any(id(t) in self.values for t in taken):
                self.values.add(id(tensor))
        return result

    def _made(
        self, func: Any, taken: list[torch.Tensor], result: torch.Tensor, active: bool
    ) -> Iterator[PositionSource]:
        """Positions out of nothing but the length."""
        square = result.ndim >= 2 and result.shape[-1] == result.shape[-2] == self.length
        counted = func in _MAKERS and result.shape == (self.length,)
        shaped = func in _SHAPERS and square and not active
        summed = func in _RUNNING and result.ndim <= 2 and result.shape[-1:] == (self.length,)
        if counted or shaped or summed:
            yield PositionSource("made", _name(func), self.running.current, written=written_here())

    def _read(
        self, func: Any, taken: list[torch.Tensor], result: torch.Tensor, by: frozenset[PositionSource]
    ) -> Iterator[PositionSource]:
        """A table of the model's that is cut to the length, or looked up by positions."""
        if func is F.embedding and len(taken) > 1 and id(taken[0]) in self.values:
            return
        if func is F.embedding and len(taken) > 1 and by and id(taken[1]) in self.tables:
            kind, name = self.tables[id(taken[1])]
            if (
                taken[0].shape.count(self.length) > 1
            ):  # for pairs of tokens: a row for each distance, or bucket of them
                return
            yield PositionSource(kind, name, self.running.current, 0, taken[1].shape[0])
        elif func in _CUTS and taken and id(taken[0]) in self.tables and self.length in result.shape:
            if len(taken) > 1 and not by:  # rows that the batch itself picks: positions of its own, say
                return
            kind, name = self.tables[id(taken[0])]
            table = taken[0]
            dim = next((d for d in range(table.ndim) if _is_cut(table, result, d, self.length)), 0)
            yield PositionSource(kind, name, self.running.current, dim, table.shape[dim])


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among some values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_cut(table: torch.Tensor, result: torch.Tensor, dim: int, length: int) -> bool:
    """Whether a table's dimension is what became the sequence."""
    if table.ndim == result.ndim:
        return result.shape[dim] == length
    return table.shape[dim] not in result.shape


def _name(func: Any) -> str:
    name: str = resolve_name(func) or getattr(func, "__name__", str(func))
    return name.replace("torch._VariableFunctionsClass.", "torch.").replace("torch.Tensor.", "Tensor.")
