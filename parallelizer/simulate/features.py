"""Fused features, followed through a step: of `q|k|v` in one projection each rank needs its slice of each part.

A plain shard of the output features is a run of neighbours. A forward that takes the dimension apart (chunk, split,
unbind, a slice) takes something else on each rank then, in silence: every size fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.program import Program
from parallelizer.simulate.varying import Varying
from parallelizer.styles.linears import feature_dims

_MARK = "_parallelizer_features"
_TAKEN_APART = (
    "aten::split",
    "aten::split_with_sizes",
    "aten::unbind",
    "aten::select",
    "aten::slice",
    "aten::glu",
)
_SAME = ("aten::clone", "aten::_to_copy", "aten::contiguous", "aten::alias", "aten::detach")
_RESHAPED = ("aten::view", "aten::_unsafe_view", "aten::unsqueeze", "aten::squeeze", "aten::reshape")


@dataclass(frozen=True)
class TakenApart:
    """The sharded output features of `projection`, taken apart in `module` into parts of these `sizes` (empty where
    only some were taken).
    """

    projection: str
    module: str
    sizes: tuple[int, ...]


class Features:
    """Follows the sharded dimension of projections' outputs as long as it can be told which one it is."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self.found: list[TakenApart] = []

    def mark(self, output: torch.Tensor, projection: str) -> None:
        """The last dimension of this tensor is a shard of the projection's features."""
        setattr(output, _MARK, (projection, output.ndim - 1))

    def __call__(
        self, func: Any, args: Sequence[Any], read: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Look at one operator that was run; not inside autograd functions, where it is ours that take apart."""
        if not torch.is_grad_enabled():
            return
        first = next((a for a in args if isinstance(a, torch.Tensor) and hasattr(a, _MARK)), None)
        if first is None or not made:
            return
        (projection, dim), name = getattr(first, _MARK), func._schema.name
        if name in _TAKEN_APART and first is args[0]:
            if _dim(func, args) % first.ndim == dim:
                if name == "aten::slice" and _evenly(func, args, first.shape[dim], made[0].shape[dim]):
                    setattr(made[0], _MARK, (projection, dim))  # every n-th: of a run too
                    return
                self._take(projection, name, first, made, dim)
                return
            moved = dim - (name in ("aten::unbind", "aten::select") and _dim(func, args) % first.ndim < dim)
        elif name in ("aten::permute", "aten::transpose", "aten::t"):
            moved = _permuted(func, args, first.ndim).index(dim)
        elif name in _RESHAPED:
            moved = _reshaped(first.shape, made[0].shape, dim)
        elif made[0].shape == first.shape and (torch.Tag.pointwise in func.tags or name in _SAME):
            moved = dim
        else:
            return
        for tensor in made if moved is not None else ():
            setattr(tensor, _MARK, (projection, moved))

    def _take(
        self, projection: str, name: str, whole: torch.Tensor, made: Sequence[torch.Tensor], dim: int
    ) -> None:
        if name in ("aten::unbind", "aten::select"):
            sizes = (1,) * whole.shape[dim] if name == "aten::unbind" else ()
        elif name == "aten::glu":
            sizes = (1, 1)
        else:
            sizes = tuple(t.shape[dim] for t in made)
            if sizes == (whole.shape[dim],):
                return  # all of it
            sizes = sizes if len(sizes) > 1 else ()
        if projection not in [f.projection for f in self.found]:
            self.found.append(TakenApart(projection, self.where(), _ratios(sizes)))


@contextmanager
def watch_features(program: Program, model: nn.Module, varying: Varying) -> Iterator[list[TakenApart]]:
    """Watch what a forward does with output features that are sharded without being packed. What is yielded fills
    while it runs.
    """
    features = Features(varying.where)

    def mark(path: str, axis: str, dim: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            weight = module.get_parameter("weight")
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            plain = isinstance(output, torch.Tensor) and not isinstance(output, DTensor)
            if plain and axis in varying.tags(output) and output.shape[-1] == local.shape[dim]:
                features.mark(output, path)

        return hook

    handles = []
    for a in program.of_slot("params"):
        module = model.get_submodule(a.module)
        dims = feature_dims(module)
        if dims is None or dims.rows or "weight" in a.packed:
            continue
        for axis, placement in a.params.get("weight", {}).items():
            if placement.dim == dims.outputs and axis in varying.watched:
                handles.append(module.register_forward_hook(mark(a.module, axis, dims.outputs)))
    try:
        with varying.shown_to(features):
            yield features.found
    finally:
        for handle in handles:
            handle.remove()


def _evenly(func: Any, args: Sequence[Any], before: int, after: int) -> bool:
    """Whether a slice takes every n-th of a dimension that n divides."""
    step = next((v for a, v in zip(func._schema.arguments, args, strict=False) if a.name == "step"), 1)
    return step > 1 and after * step == before


def _ratios(sizes: tuple[int, ...]) -> tuple[int, ...]:
    divisor = math.gcd(*sizes) if sizes else 1
    return tuple(size // max(1, divisor) for size in sizes)


def _dim(func: Any, args: Sequence[Any]) -> int:
    """The `dim` that an operator works along."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            return int(args[index] if index < len(args) else argument.default_value)
    return 0


def _permuted(func: Any, args: Sequence[Any], ndim: int) -> list[int]:
    """For each dimension of the result, which of the operand it is."""
    if func._schema.name == "aten::permute":
        return [d % ndim for d in args[1]]
    dims = list(range(ndim))
    a, b = (args[1] % ndim, args[2] % ndim) if len(args) > 2 else (0, ndim - 1)
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _reshaped(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """The dimension after a view that a shard of `dim` before it is a shard of: the first of its factors. None where
    that cannot be told: in `[1, 128]` out of 128 the first may be a rank's only head, or a dimension put in.
    """
    ahead = math.prod(before[:dim])
    for j, size in enumerate(after):
        if math.prod(after[:j]) == ahead and size > 1:
            alone = size == before[dim] and j > 0 and after[j - 1] == 1 and math.prod(after[: j - 1]) == ahead
            fits = before[dim] % size == 0 or size % before[dim] == 0
            return j if fits and not alone else None
    return None
