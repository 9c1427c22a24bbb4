"""Over which axes a tensor's value varies from rank to rank, followed through every operator of a step.

Each local tensor is tagged with the axes over which ranks hold different values. A shard of a parameter, and
what DTensor cuts out of a replicated tensor, vary; a gather or a sum over an axis makes them equal again;
every other operator hands on the tags of all that it reads. So the tags say "varies" of everything that may,
and never "equal" of what does not, but for what a program finds out by itself about its own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.compiler.observe.phase import current as current_phase
from parallelizer.simulate.collectives import KINDS
from parallelizer.styles.equal_gradient import equal_axes
from parallelizer.styles.random_numbers import drawing_apart
from parallelizer.torch_private import TorchDispatchMode, tree_leaves

Tags = Mapping[str, str]
"""The axes over which a value varies, each with the module in which that began."""

Watcher = Callable[[Any, tuple[Any, ...], list[torch.Tensor], list[torch.Tensor]], None]
"""Called with an operator that was run, its positional arguments, the tensors that it read and those it made."""

SEQUENCE_AXIS = "cp"
"""The axis that splits sequences; the other axes that are watched split the model."""

EQUAL: Tags = {}
_TAGS, _MAKER = "_parallelizer_varies_over", "_parallelizer_made_in"
_EQUAL_DRAW = "_parallelizer_drawn_alike"
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones",
               "new_full", "new_empty_strided", "rand_like", "randn_like", "zero_", "fill_")  # fmt: skip
"""Operators that read of a tensor its shape, and not its values."""


@dataclass(frozen=True)
class EqualSum:
    """A sum over `axis` of what every rank of it holds alike: its result is `size` times too large."""

    axis: str
    module: str
    phase: str


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator was given: its shape here, the module that made it (None for what the model or the
    batch holds), and the axes over which it varies, each with the module in which that began.
    """

    shape: tuple[int, ...]
    maker: str | None
    axes: Tags


@dataclass(frozen=True)
class EqualDraw:
    """Random numbers that are the same on every rank of `axis`, put in `module` on what each has a part of since `since`."""

    axis: str
    module: str
    since: str


@dataclass(frozen=True)
class ApartDraw:
    """Random numbers that differ between the ranks of `axis`, put in `module` on what every rank holds alike. `maker` is the
    module that made that.
    """

    axis: str
    module: str
    maker: str


class _DrawnIn(str):
    """The module since which a value varies, because ranks draw numbers of their own in it."""


class Varying(TorchDispatchMode):
    """Tags what is computed while it is active. Tensors without a tag are equal on all ranks.

    `axes` names the axis of each group by its ranks, for the axes that are watched; `where` tells the running
    module; `summed` is called with each axis over which something equal is summed.
    """

    def __init__(
        self,
        axes: Mapping[tuple[int, ...], str],
        where: Callable[[], str],
        summed: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.watchers: list[Watcher] = []
        self.axes, self.watched = axes, frozenset(axes.values())
        self.where, self.summed = where, summed
        self.operator = ""
        self.marks: dict[str, str] = {}
        """What a watcher says of the operator being run: handed on like tags, to tell what its result comes into."""
        self._operands: list[torch.Tensor] = []
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.draws: list[EqualDraw] = []
        self.apart: list[ApartDraw] = []
        # Written through a view: all tensors on the same memory change. Held, so that no address is reused.
        self.written: dict[int, tuple[Any, Tags]] = {}

    def tags(self, tensor: torch.Tensor) -> Tags:
        """The tags of a tensor; of a DTensor those of its local part."""
        local = self._local(tensor)
        own: Tags = getattr(local, _TAGS, EQUAL)
        written = self.written.get(torch_private.storage_key(local))
        return own if written is None else {**written[1], **own}

    def vary(self, tensor: torch.Tensor, axes: Iterable[str], module: str) -> None:
        """Tag a tensor as varying over some axes since a module; axes that it has keep their module."""
        local = self._local(tensor)
        new = {axis: module for axis in axes if axis in self.watched}
        if new:
            setattr(local, _TAGS, {**new, **self.tags(local)})

    def mark(self, tensor: torch.Tensor, name: str) -> None:
        """Mark what a call made: handed on like tags, to tell what it comes into."""
        local = self._local(tensor)
        setattr(local, _TAGS, {**self.tags(local), name: ""})

    def sharded(self, tensor: DTensor, module: str | None = None) -> None:
        """Tag the local part of a DTensor by its placements, since a module or the one that is running."""
        self.vary(tensor, _sharded_axes(tensor), self.where() if module is None else module)

    @contextmanager
    def shown_to(self, watcher: Watcher) -> Iterator[None]:
        """Show a watcher every operator that is run inside."""
        self.watchers.append(watcher)
        try:
            yield
        finally:
            self.watchers.remove(watcher)

    def operands(self) -> tuple[Operand, ...]:
        """What the operator that was called last was given."""
        found = []
        for tensor in self._operands:
            local = self._local(tensor)
            found.append(Operand(tuple(local.shape), getattr(local, _MAKER, None), dict(self.tags(local))))
        return tuple(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = tensors_in((args, kwargs))
        self.operator, self._operands = str(func), read
        if any(issubclass(t, DTensor) for t in types):
            for tensor in read:
                if isinstance(tensor, DTensor):
                    self.sharded(tensor)
            return NotImplemented
        if any(t.__name__ == "AsyncCollectiveTensor" for t in types):
            return NotImplemented
        result = func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        declared = equal_axes()
        tags: Tags = {axis: module for axis, module in self._union(read).items() if axis not in declared}
        if namespace in _COLLECTIVES and name in KINDS:
            tags = self._after_collective(KINDS[name], args, kwargs, tags)
            self._set(
                [*tensors_in(result), *tensors_in(args[:1])] if namespace == "c10d" else tensors_in(result),
                tags,
            )
            return result
        tags = EQUAL if name in _SHAPE_ONLY else {**tags, **self._cut_out()}
        for watcher in self.watchers if name not in _SHAPE_ONLY else ():
            watcher(func, args, read, tensors_in(result))
        tags = self._drawn(func, args, read, [*tensors_in(result), *_written(func, args)], tags)
        if self.marks:
            tags, self.marks = {**tags, **self.marks}, {}
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self._set(tensors_in(result), tags, made_of=read[0] if view and read else None)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._write(tensors_in(value), tags)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._write(tensors_in(kwargs[argument.name]), tags)
        return result

    def _drawn(
        self, func: Any, args: Any, read: list[torch.Tensor], made: list[torch.Tensor], tags: Tags
    ) -> Tags:
        """What numbers drawn alike on every rank are put on; and the tags with those of numbers drawn apart.

        Dropout draws into an empty tensor and multiplies by it, or does both at once.
        """
        draws = _draws(func, args)
        if draws and (apart := drawing_apart()):
            drawn = {axis: _DrawnIn(self.where()) for axis in apart if axis in self.watched}
            self._drawn_apart(read, {**drawn, **tags})
            return {**drawn, **tags}
        self._drawn_apart(read, tags)
        equal = [getattr(t, _EQUAL_DRAW, False) for t in read]
        if (draws or any(equal)) and current_phase() == "forward":
            for axis, since in tags.items():
                found = EqualDraw(axis, self.where(), since)
                if found not in self.draws:
                    self.draws.append(found)
        for tensor in made if draws or (read and all(equal)) else ():
            setattr(tensor, _EQUAL_DRAW, True)
        return tags

    def _drawn_apart(self, read: list[torch.Tensor], tags: Tags) -> None:
        """Note numbers of a rank's own that are put on what does not vary. Dropout may draw into a tensor that it has made."""
        here = self.where()
        for axis, module in tags.items():
            if not isinstance(module, _DrawnIn) or module != here or axis not in drawing_apart():
                continue
            for tensor in read:
                maker = getattr(self._local(tensor), _MAKER, None)
                if axis in self.tags(tensor) or maker in (None, here):
                    continue
                found = ApartDraw(axis, here, maker)
                if found not in self.apart:
                    self.apart.append(found)

    def _union(self, tensors: Iterable[torch.Tensor]) -> Tags:
        """The tags of all. What varied without numbers of a rank's own began to vary there."""
        union: dict[str, str] = {}
        for tensor in tensors:
            for axis, module in self.tags(tensor).items():
                if isinstance(union.get(axis, _DrawnIn()), _DrawnIn):
                    union[axis] = module
        return union

    def _set(self, tensors: Iterable[torch.Tensor], tags: Tags, made_of: torch.Tensor | None = None) -> None:
        """Tag what an operator has made; a view is made where that is which it looks at."""
        maker = self.where() if made_of is None else getattr(made_of, _MAKER, None)
        for tensor in tensors:
            setattr(tensor, _TAGS, tags)
            setattr(tensor, _MAKER, maker)

    def _write(self, tensors: Iterable[torch.Tensor], tags: Tags) -> None:
        for tensor in tensors:
            setattr(tensor, _TAGS, tags)
            if tags:
                storage = tensor.untyped_storage()
                key = torch_private.storage_key(tensor)
                before = self.written.get(key, (None, EQUAL))[1]
                self.written[key] = storage, {**tags, **before}

    def _after_collective(self, kind: str, args: Any, kwargs: Any, tags: Tags) -> Tags:
        axis = self._axis((args, kwargs))
        if axis is None:
            return tags
        if kind in ("all_reduce", "reduce_scatter") and axis not in tags and "sum" in _words((args, kwargs)):
            self.summed(axis)
        if kind in ("all_gather", "all_reduce", "broadcast"):
            return {a: m for a, m in tags.items() if a != axis}
        return {axis: self.where(), **tags}

    def _axis(self, arguments: Any) -> str | None:
        """The watched axis that a collective goes over, or None."""
        leaves = tree_leaves(arguments)
        group = next((g for a in leaves if (g := torch_private.group_name(a))), None)
        if group is None:
            group = [a for a in leaves if isinstance(a, str)][-1]
        if group not in self.ranks:
            self.ranks[group] = torch_private.group_ranks(group)
        return self.axes.get(self.ranks[group])

    def _cut_out(self) -> Tags:
        """The axes over which DTensor, if it is what runs, is cutting a rank's part out of a whole."""
        axes = torch_private.redistributed_to()
        return {axis: self.where() for axis in axes if axis in self.watched}

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch_private.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _draws(func: Any, args: Any) -> bool:
    """Whether an operator draws random numbers. Attention may, and does where its `dropout_p` is above 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [a.name for a in func._schema.arguments]
    return "dropout_p" not in names or any(
        n == "dropout_p" and value for n, value in zip(names, args, strict=False)
    )


def _written(func: Any, args: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes into."""
    pairs = zip(func._schema.arguments, args, strict=False)
    return [
        t
        for a, value in pairs
        if a.alias_info is not None and a.alias_info.is_write
        for t in tensors_in(value)
    ]


def _sharded_axes(tensor: DTensor) -> list[str]:
    names = tensor.device_mesh.mesh_dim_names or ()
    return [name for name, p in zip(names, tensor.placements, strict=False) if torch_private.is_sharded(p)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a call's arguments or results."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _words(arguments: Any) -> set[str]:
    return {a for a in tree_leaves(arguments) if isinstance(a, str)}
