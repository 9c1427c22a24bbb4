"""Operators of a model that need the whole of what each rank has a part of, followed through a forward.

A mean over sharded features, a shift along a split sequence, a softmax over a rank's own columns: they run, every
size fits, and each rank computes something else than the unsharded model. So it does where fused features (`q|k|v` of
one projection) are taken apart, and a rank has a run of neighbours instead of its slice of each part.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from parallelizer import torch_private
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Flow
from parallelizer.simulate.follow.parts import (
    Call,
    Lay,
    NeedsWhole,
    Part,
    TakesApart,
    Terms,
    after,
    in_proportion,
)
from parallelizer.simulate.follow.varying import SEQUENCE_AXIS, Varying
from parallelizer.styles.application import Application, Program
from parallelizer.styles.linears import feature_dims

_LAYS, _FEATURES = "_parallelizer_lies", "_parallelizer_features"


@dataclass(frozen=True)
class WholeNeeded:
    """`operator` looked, in `module`, along `dim` of a tensor of `shape` that is cut over `axis` since `since`; `dim` is
    None where it was given terms of a sum instead. `written` is the line of the model.
    """

    module: str
    axis: str
    operator: str
    dim: int | None
    shape: tuple[int, ...]
    since: str
    written: Span | None


@dataclass(frozen=True)
class TakenApart:
    """The sharded output features of `projection`, taken apart in `module` into parts of these `sizes` (empty where
    only some were taken), where they were split as one, or in other parts: `packed`.
    """

    projection: str
    module: str
    sizes: tuple[int, ...]
    packed: tuple[int, ...] = ()


class Wholes:
    """Follows parts of tensors from the border to DTensor, or from the batch, to what needs the whole of them; and features
    that a rule splits from the projection that makes them to what takes them apart (`taken_apart`).

    `packed` has the parts of the projections that are split part by part. What happens with gradients off is left alone:
    there our own autograd functions work, and torch's.
    """

    def __init__(self, varying: Varying, packed: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.varying = varying
        self.packed = packed or {}
        self.found: list[WholeNeeded] = []
        self.taken_apart: list[TakenApart] = []

    def __call__(
        self, func: Any, args: Sequence[Any], read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Look at one operator that was run."""
        if not torch.is_grad_enabled():
            if func._schema.name == "aten::view":
                self._border(made)
            return
        self._follow_features(func, args, read, made)
        lays: dict[str, Lay] = {}
        for axis in {axis for tensor in read for axis in lays_of(tensor)}:
            sums = axis != SEQUENCE_AXIS  # over the sequence nothing is summed but the loss
            try:
                lay = after(Call(func, args, made, functools.partial(_lay, axis), sums))
            except NeedsWhole:
                if not self._may_be_terms(axis, read):
                    self._find(func, axis, read)
                continue
            if lay is not None:
                lays[axis] = lay
        for tensor in made if lays else ():
            mark(tensor, lays)

    def _follow_features(
        self, func: Any, args: Sequence[Any], read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Follow the features of each projection by themselves, whatever else is known of a tensor."""
        parts: dict[str, Lay] = {}
        for projection in {projection for tensor in read for projection in _features_of(tensor)}:
            lay_of = functools.partial(_feature_part, projection)
            try:
                part = after(Call(func, args, made, lay_of, sums=False, features=True))
            except TakesApart as taken:
                packed = self.packed.get(projection, ())
                known = projection in [t.projection for t in self.taken_apart]
                if not known and not _between_parts(packed, taken.sizes):
                    found = TakenApart(projection, self.varying.where(), taken.sizes, in_proportion(packed))
                    self.taken_apart.append(found)
                continue
            if part is not None:
                parts[projection] = part
        for tensor in made if parts else ():
            setattr(tensor, _FEATURES, parts)

    def _border(self, made: Sequence[torch.Tensor]) -> None:
        """A DTensor hands out its local part: how that lies is written on it."""
        whole = torch_private.made_plain()
        if whole is None:
            return
        where = self.varying.where()
        packed = where if where in self.packed else ""
        names = whole.device_mesh.mesh_dim_names or ()
        for tensor in made:
            lays: dict[str, Lay] = {}
            for axis, placement in zip(names, whole.placements, strict=False):
                if axis in self.varying.watched and isinstance(placement, Shard):
                    dim = placement.dim % tensor.ndim
                    features = dim == tensor.ndim - 1
                    lays[axis] = Part(
                        dim, tensor.shape[dim], features=features, packed=packed if features else ""
                    )
                elif axis in self.varying.watched and placement.is_partial("sum"):
                    lays[axis] = Terms()
            mark(tensor, lays)

    def _may_be_terms(self, axis: str, read: Sequence[torch.Tensor]) -> bool:
        """Whether terms of a sum meet a tensor of unknown placement, which may be terms too and then is right."""
        terms = [t for t in read if isinstance(_lay(axis, t), Terms)]
        unknown = [t for t in read if _lay(axis, t) is None and axis in self.varying.tags(t)]
        return bool(terms and unknown)

    def _find(self, func: Any, axis: str, read: Sequence[torch.Tensor]) -> None:
        tensor = next(t for t in read if axis in lays_of(t))
        lay = lays_of(tensor)[axis]
        found = WholeNeeded(
            self.varying.where(),
            axis,
            func._schema.name.partition("::")[2].strip("_"),
            lay.dim if isinstance(lay, Part) else None,
            tuple(tensor.shape),
            self.varying.tags(tensor).get(axis, ""),
            written_here(),
        )
        self.varying.marks[f"needs {len(self.found)}"] = ""
        self.found.append(found)

    def reaching(self, result: torch.Tensor) -> list[WholeNeeded]:
        """Those whose result has come into a tensor: what is only looked at changes nothing."""
        tags = self.varying.tags(result)
        return [found for index, found in enumerate(self.found) if f"needs {index}" in tags]


def _between_parts(parts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether features that a rank has a slice of each part of are taken apart between parts, as far as the sizes tell."""
    if not parts or not sizes:
        return bool(parts)
    return _cuts(sizes, sum(parts)) <= _cuts(parts, sum(sizes))


def _cuts(sizes: Sequence[int], scale: int) -> set[int]:
    """The places between the sizes, times a scale."""
    return {end * scale for end in itertools.accumulate(sizes)}


def features_from(projection: str, output: torch.Tensor) -> None:
    """Say that the last dimension of a tensor is a shard of the projection's output features."""
    setattr(output, _FEATURES, {projection: Part(output.ndim - 1, output.shape[-1])})


def _features_of(tensor: torch.Tensor) -> Mapping[str, Lay]:
    parts: Mapping[str, Lay] = getattr(tensor, _FEATURES, {})
    return parts


def _feature_part(projection: str, tensor: torch.Tensor) -> Lay | None:
    return _features_of(tensor).get(projection)


def _lay(axis: str, tensor: torch.Tensor) -> Lay | None:
    return lays_of(tensor).get(axis)


def lays_of(tensor: torch.Tensor) -> Mapping[str, Lay]:
    """How a tensor lies, by axis, as far as it is known."""
    lays: Mapping[str, Lay] = getattr(tensor, _LAYS, {})
    return lays


def mark(tensor: torch.Tensor, lays: Mapping[str, Lay]) -> None:
    """Say how a tensor lies, by axis."""
    fits = {a: lay for a, lay in lays.items() if isinstance(lay, Terms) or lay.dim < tensor.ndim}
    if fits:
        setattr(tensor, _LAYS, fits)


@contextmanager
def watch_wholes(
    program: Program, model: nn.Module, batch: Mapping[str, torch.Tensor], varying: Varying
) -> Iterator[Wholes]:
    """Watch a forward of a batch that is split already. The model's buffers are left out: of a table that is split
    with the sequence, a forward takes the first rows, and these are the right ones.
    """
    packed = {a.module: next(iter(a.packed.values())).parts for a in program.of_slot("params") if a.packed}
    wholes = Wholes(varying, packed)
    handles: list[RemovableHandle] = [*_mark_features(program, model, varying)]
    if SEQUENCE_AXIS in varying.watched:
        for name, entry in program.plan.batch.items():
            if name in batch and entry.dim is not None:
                _split_along(batch[name], entry.dim)
        for a in program.of_slot("io"):
            if a.axis == SEQUENCE_AXIS:
                handles += _mark_what_is_split(model.get_submodule(a.module), a)
        handles += _carried_through(program, model)
    try:
        with varying.shown_to(wholes):
            yield wholes
    finally:
        for handle in handles:
            handle.remove()


def _mark_features(program: Program, model: nn.Module, varying: Varying) -> Iterator[RemovableHandle]:
    """A rule splits the output features of a projection: say so of what comes out of it."""

    def hook_of(path: str, axis: str, dim: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weight = module.get_parameter("weight")
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            plain = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
            if plain and axis in varying.tags(output) and output.shape[-1] == local.shape[dim]:
                features_from(path, output)

        return hook

    for a in program.of_slot("params"):
        module = model.get_submodule(a.module)
        dims = feature_dims(module)
        packing = a.packed.get("weight")
        if dims is None or dims.rows or (packing is not None and packing.dim != dims.outputs):
            continue
        for axis, placement in a.params.get("weight", {}).items():
            if placement.dim == dims.outputs and axis in varying.watched:
                yield module.register_forward_hook(hook_of(a.module, axis, dims.outputs))


def _mark_what_is_split(module: nn.Module, a: Application) -> Iterator[RemovableHandle]:
    """A rule splits the sequence inside the model, in an autograd function of ours: say what comes out of it."""
    inputs, outputs = (_dims(a.options.get(what, {})) for what in ("input", "output"))

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = {"": next(iter(args), None), **dict(zip(names, args, strict=False)), **kwargs}
        for name, dim in inputs.items():
            _split_along(given.get(name), dim)

    def behind(module: nn.Module, args: Any, output: Any) -> None:
        if "" in outputs:
            _split_along(output, outputs[""])

    names = list(inspect.signature(module.forward).parameters)
    if inputs:
        yield module.register_forward_pre_hook(before, with_kwargs=True)
    if outputs:
        yield module.register_forward_hook(behind)


def _carried_through(program: Program, model: nn.Module) -> Iterator[RemovableHandle]:
    """The placement of the sequence is unknown inside DTensor; after it, it is as before.

    A rule of a tensor axis lays inputs and outputs out anew over its own axis, and what it makes of a linear layer, an embedding
    or a norm has the rows of what came in. What a rule of the same module gathers over the sequence's axis is whole.
    """
    for path in {a.module for a in program.of_slot("params", "io") if SEQUENCE_AXIS not in a.axes}:
        module = model.get_submodule(path)
        keeps_rows = any(a.module == path and a.style in _KEEP_ROWS for a in program.of_slot("params"))
        over_sequence = [a for a in program.of_slot("io") if a.module == path and a.axis == SEQUENCE_AXIS]
        gathered = {
            what: {name for a in over_sequence for name in _gathered(a.options.get(what, {}))}
            for what in ("input", "output")
        }
        yield from _carry(module, keeps_rows, gathered)


_KEEP_ROWS = ("colwise", "rowwise", "sequence")


def _carry(
    module: nn.Module, keeps_rows: bool, gathered: Mapping[str, Collection[str]]
) -> Iterator[RemovableHandle]:
    names = list(inspect.signature(module.forward).parameters)
    whole = {names[0] if name == "" and names else name for name in gathered["input"]}
    given: dict[str, int] = {}
    first: list[int] = []
    made: list[int] = []

    def by_name(args: Any, kwargs: Any) -> dict[str, Any]:
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def raw_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
        values = by_name(args, kwargs)
        found = {n: dim for n, v in values.items() if n not in whole and (dim := _split_dim(v)) is not None}
        given.clear()
        given.update(found)
        first[:] = list(found.values())[:1]

    def inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
        values = by_name(args, kwargs)
        for name, dim in given.items():
            _still_split(values.get(name), dim)

    def raw_output(module: nn.Module, args: Any, output: Any) -> None:
        dim = _split_dim(output)
        made[:] = [dim] if dim is not None else first if keeps_rows else []
        if gathered["output"]:
            made.clear()

    def output(module: nn.Module, args: Any, output: Any) -> None:
        for dim in made:
            _still_split(output, dim)

    yield module.register_forward_pre_hook(raw_inputs, prepend=True, with_kwargs=True)
    yield module.register_forward_pre_hook(inputs, with_kwargs=True)
    yield module.register_forward_hook(raw_output, prepend=True)
    yield module.register_forward_hook(output)


def _split_dim(value: Any) -> int | None:
    """The dimension along which the sequence is split, if it is known."""
    lay = lays_of(value).get(SEQUENCE_AXIS) if isinstance(value, torch.Tensor) else None
    return lay.dim if isinstance(lay, Part) and lay.outer == 1 else None


def _still_split(value: Any, dim: int) -> None:
    if isinstance(value, torch.Tensor) and _split_dim(value) is None and dim < value.ndim:
        _split_along(value, dim)


def _dims(flows: Mapping[str, Flow]) -> dict[str, int]:
    return {n: f.wanted.dim for n, f in flows.items() if f.wanted is not None and f.wanted.dim is not None}


def _gathered(flows: Mapping[str, Flow]) -> set[str]:
    return {name for name, flow in flows.items() if flow.wanted is not None and flow.wanted.dim is None}


def _split_along(value: Any, dim: int) -> None:
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        mark(value, {**lays_of(value), SEQUENCE_AXIS: Part(dim % value.ndim, value.shape[dim])})
