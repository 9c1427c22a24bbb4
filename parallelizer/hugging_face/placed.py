"""Tensors known only by where their numbers stand: which pieces of which stored tensors they are made of.

transformers renames, stacks, joins, splits and transposes a checkpoint's tensors on their way into a model. Run on a
`Placed` instead of values, the same code of transformers says where each number of a parameter stands in the files,
so that a rank reads its own slice and nothing else, and that saving is the same map read backwards.

Every piece is an affine map: the number at (i, j, ...) of the piece stands at base + i * step of some stored dimension
+ j * step of another + ... . Slicing, joining, transposing and reshaping keep it so. Arithmetic does not, and is
refused with `NotPlaced`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallelizer.mesh import cut

MOST_PIECES = 1 << 16
"""More pieces than this are refused: each is read by itself."""


class NotPlaced(Exception):
    """An operation whose result is no rearrangement of stored numbers."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a piece: it fills `at` to `at + count` of the whole, and walks dimension `dim` of the stored
    tensor in steps of `step` (0 where the stored tensor has no such dimension and `count` is 1).
    """

    at: int
    count: int
    dim: int
    step: int


@dataclass(frozen=True)
class AffinePiece:
    """A part of a tensor that stands in the stored tensor `name`, beginning at index `base`."""

    name: str
    base: tuple[int, ...]
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class StoredRegion:
    """Indices of the stored tensor `name`, (start, count, step) for each of its dimensions, and how they lie in the
    whole: `box` is (start, count) for each dimension of the whole, and `dims` says for each of those which stored
    dimension it is, -1 where it is none because the box has one index there.
    """

    name: str
    indices: tuple[tuple[int, int, int], ...]
    box: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """A view of `part`, whose shape is the box's, with the stored tensor's dimensions in their order."""
        kept = [d for d, dim in enumerate(self.dims) if dim >= 0]
        view = part[tuple(slice(None) if dim >= 0 else 0 for dim in self.dims)]
        view = view.permute(sorted(range(len(kept)), key=lambda i: self.dims[kept[i]]))
        return view[tuple(slice(None) if k in self.dims else None for k in range(len(self.indices)))]


class Placed(torch.Tensor):
    """A tensor on meta that knows its `pieces`. Operations that rearrange numbers give a Placed again, those that only
    look at shapes are torch's, all others raise NotPlaced.
    """

    pieces: tuple[AffinePiece, ...]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _LOOKS or name == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        if name not in _REARRANGES:
            raise NotPlaced(name)
        return _REARRANGES[name](*args, **(kwargs or {}))


def stored(name: str, shape: Sequence[int], dtype: torch.dtype) -> Placed:
    """The whole of one stored tensor."""
    axes = tuple(Axis(0, size, dim, 1) for dim, size in enumerate(shape))
    return _placed(shape, dtype, (AffinePiece(name, (0,) * len(shape), axes),))


def regions(whole: Placed, box: Sequence[tuple[int, int]]) -> Iterator[StoredRegion]:
    """What must be read for a box of the whole, (start, count) for each dimension. Raises NotPlaced for a piece that
    walks a stored dimension along two of its own.
    """
    for piece in whole.pieces:
        cut = piece
        for dim, (start, count) in enumerate(box):
            cut = _cut(cut, dim, start, count) if cut is not None else None  # type: ignore[assignment]
        if cut is not None and all(axis.count for axis in cut.axes):
            yield _region(cut)


def _region(piece: AffinePiece) -> StoredRegion:
    indices = [(start, 1, 1) for start in piece.base]
    dims = []
    for axis in piece.axes:
        if axis.count == 1:
            dims.append(-1)
            continue
        if axis.dim in dims or axis.step < 1:
            raise NotPlaced("a dimension that is walked twice")
        indices[axis.dim] = (piece.base[axis.dim], axis.count, axis.step)
        dims.append(axis.dim)
    return StoredRegion(piece.name, tuple(indices), tuple((a.at, a.count) for a in piece.axes), tuple(dims))


def _placed(shape: Sequence[int], dtype: torch.dtype, pieces: tuple[AffinePiece, ...]) -> Placed:
    if len(pieces) > MOST_PIECES:
        raise NotPlaced("a rearrangement into very many pieces")
    made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Placed)
    made.pieces = pieces
    return made


def _cut(piece: AffinePiece, dim: int, start: int, count: int) -> AffinePiece | None:
    """What of a piece lies in [start, start + count) of the whole's dimension, counted from `start`."""
    axis = piece.axes[dim]
    first, end = max(axis.at, start), min(axis.at + axis.count, start + count)
    if first >= end and (axis.count or count):
        return None
    base = list(piece.base)
    if axis.step:
        base[axis.dim] += axis.step * (first - axis.at)
    cut = Axis(first - start, end - first, axis.dim, axis.step)
    return AffinePiece(piece.name, tuple(base), (*piece.axes[:dim], cut, *piece.axes[dim + 1 :]))


def _narrow(whole: Placed, dim: int, start: int, length: int) -> Placed:
    dim = _dim(whole, dim)
    shape = [*whole.shape[:dim], length, *whole.shape[dim + 1 :]]
    pieces = (_cut(piece, dim, start, length) for piece in whole.pieces)
    return _placed(shape, whole.dtype, tuple(p for p in pieces if p is not None))


def _cat(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    dim, at, pieces = _dim(tensors[0], dim), 0, []
    for tensor in tensors:
        for piece in tensor.pieces:
            moved = replace(piece.axes[dim], at=piece.axes[dim].at + at)
            pieces.append(replace(piece, axes=(*piece.axes[:dim], moved, *piece.axes[dim + 1 :])))
        at += tensor.shape[dim]
    first = tensors[0]
    if any(
        t.shape[:dim] != first.shape[:dim] or t.shape[dim + 1 :] != first.shape[dim + 1 :] for t in tensors
    ):
        raise ValueError(
            f"shapes {', '.join(str(list(t.shape)) for t in tensors)} cannot be joined along {dim}"
        )
    return _placed([*first.shape[:dim], at, *first.shape[dim + 1 :]], first.dtype, tuple(pieces))


def _stack(tensors: Sequence[Placed], dim: int = 0) -> Placed:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _unsqueeze(whole: Placed, dim: int) -> Placed:
    dim = dim + whole.dim() + 1 if dim < 0 else dim
    return _placed(
        [*whole.shape[:dim], 1, *whole.shape[dim:]],
        whole.dtype,
        tuple(replace(p, axes=(*p.axes[:dim], Axis(0, 1, 0, 0), *p.axes[dim:])) for p in whole.pieces),
    )


def _squeeze(whole: Placed, dim: int | None = None) -> Placed:
    if dim is None:
        raise NotPlaced("squeeze of every dimension")
    dim = _dim(whole, dim)
    if whole.shape[dim] != 1:
        return whole
    return _placed(
        [*whole.shape[:dim], *whole.shape[dim + 1 :]],
        whole.dtype,
        tuple(replace(p, axes=(*p.axes[:dim], *p.axes[dim + 1 :])) for p in whole.pieces),
    )


def _select(whole: Placed, dim: int, index: int) -> Placed:
    return _squeeze(_narrow(whole, dim, index, 1), dim)


def _unbind(whole: Placed, dim: int = 0) -> tuple[Placed, ...]:
    return tuple(_select(whole, dim, i) for i in range(whole.shape[_dim(whole, dim)]))


def _split(whole: Placed, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Placed, ...]:
    size, sizes = whole.shape[_dim(whole, dim)], split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    if sum(sizes) != size:
        raise ValueError(f"a dimension of {size} cannot be split into {list(sizes)}")
    return tuple(_narrow(whole, dim, sum(sizes[:i]), part) for i, part in enumerate(sizes))


def _chunk(whole: Placed, chunks: int, dim: int = 0) -> tuple[Placed, ...]:
    return _split(whole, max(1, cut(whole.shape[_dim(whole, dim)], chunks, 0)[1]), dim)


def _permute(whole: Placed, *dims: Any) -> Placed:
    order = [_dim(whole, d) for d in (dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)]
    return _placed(
        [whole.shape[d] for d in order],
        whole.dtype,
        tuple(replace(p, axes=tuple(p.axes[d] for d in order)) for p in whole.pieces),
    )


def _transpose(whole: Placed, dim0: int, dim1: int) -> Placed:
    order = list(range(whole.dim()))
    a, b = _dim(whole, dim0), _dim(whole, dim1)
    order[a], order[b] = order[b], order[a]
    return _permute(whole, order)


def _item(whole: Placed, key: Any) -> Placed:
    keys = key if isinstance(key, tuple) else (key,)
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys = (*keys[:at], *[slice(None)] * (whole.dim() - len(keys) + 1), *keys[at + 1 :])
    dim = 0
    for k in keys:
        if isinstance(k, slice) and k.step in (None, 1):
            start, stop, _ = k.indices(whole.shape[dim])
            whole, dim = _narrow(whole, dim, start, max(0, stop - start)), dim + 1
        elif isinstance(k, int):
            whole = _select(whole, dim, k % whole.shape[dim])
        else:
            raise NotPlaced("indexing")
    return whole


def _reshape(whole: Placed, *shape: Any) -> Placed:
    """By way of a shape that both refine: dimensions are split first, and then merged."""
    target = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if -1 in target:
        known = math.prod(s for s in target if s != -1)
        target[target.index(-1)] = math.prod(whole.shape) // max(known, 1)
    if math.prod(target) != math.prod(whole.shape) or 0 in target:
        raise NotPlaced(f"reshape of {list(whole.shape)} to {target}")
    for dim in reversed(range(whole.dim())):
        whole = _squeeze(whole, dim)
    wanted = [s for s in target if s != 1]
    factors = _common_factors(list(whole.shape), wanted)
    for dim, size in enumerate(factors):
        if whole.shape[dim] != size:
            whole = _unflatten(whole, dim, size)
    for dim, size in enumerate(wanted):
        while whole.shape[dim] != size:
            whole = _flatten(whole, dim)
    for dim, size in enumerate(target):
        if size == 1:
            whole = _unsqueeze(whole, dim)
    return whole


def _common_factors(old: list[int], new: list[int]) -> list[int]:
    """The shortest shape of which both are merges."""
    factors, old, new = [], old[::-1], new[::-1]
    while old:
        a, b = old.pop(), new.pop()
        small = min(a, b)
        if a % small or b % small:
            raise NotPlaced("reshape across dimensions")
        factors.append(small)
        if a > small:
            old.append(a // small)
        if b > small:
            new.append(b // small)
    return factors


def _unflatten(whole: Placed, dim: int, outer: int) -> Placed:
    inner = whole.shape[dim] // outer
    if any(p.axes[dim].count != whole.shape[dim] for p in whole.pieces):
        return _stack([_narrow(whole, dim, i * inner, inner) for i in range(outer)], dim)
    pieces = []
    for piece in whole.pieces:
        axis = piece.axes[dim]
        two = Axis(0, outer, axis.dim, axis.step * inner), Axis(0, inner, axis.dim, axis.step)
        pieces.append(replace(piece, axes=(*piece.axes[:dim], *two, *piece.axes[dim + 1 :])))
    return _placed([*whole.shape[:dim], outer, inner, *whole.shape[dim + 1 :]], whole.dtype, tuple(pieces))


def _flatten(whole: Placed, dim: int) -> Placed:
    """Dimensions `dim` and `dim + 1` made one."""
    outer, inner = whole.shape[dim], whole.shape[dim + 1]
    pieces = []
    for piece in whole.pieces:
        a, b = piece.axes[dim], piece.axes[dim + 1]
        if (a.count, b.count, a.dim, a.step) != (outer, inner, b.dim, b.step * inner):
            return _cat([_select(whole, dim, i) for i in range(outer)], dim)
        merged = Axis(0, outer * inner, b.dim, b.step)
        pieces.append(replace(piece, axes=(*piece.axes[:dim], merged, *piece.axes[dim + 2 :])))
    return _placed([*whole.shape[:dim], outer * inner, *whole.shape[dim + 2 :]], whole.dtype, tuple(pieces))


def _same(whole: Placed, *_: Any, **__: Any) -> Placed:
    return whole


def _dim(whole: Placed, dim: int) -> int:
    if not -whole.dim() <= dim < whole.dim():
        raise IndexError(f"there is no dimension {dim} in a shape {list(whole.shape)}")
    return dim % whole.dim()


_REARRANGES: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "narrow": _narrow,
    "split": _split,
    "chunk": _chunk,
    "unbind": _unbind,
    "select": _select,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "t": functools.partial(_transpose, dim0=0, dim1=1),
    "permute": _permute,
    "reshape": _reshape,
    "view": _reshape,
    "__getitem__": _item,
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
}
"""By the name of torch's function or method."""

_LOOKS = frozenset(
    {"size", "dim", "numel", "__len__", "is_floating_point", "is_contiguous", "element_size", "__repr__"}
)
