"""How operators hand on the atoms of their operands: each takes (node, arguments) and gives the dimensions of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from parallelizer.propose.from_forward.atoms import (
    ARGUMENT,
    UNIFORM,
    Dim,
    align,
    cut,
    every_nth,
    fresh,
    refuse,
    size_of,
    view,
)
from parallelizer.propose.from_forward.seen import Dims

aten = torch.ops.aten

Handler = Callable[["Watcher", torch.Tensor, Sequence[Any], dict[str, Any]], Dims]
_HANDLERS: dict[Any, Handler] = {}


class Watcher(Protocol):
    """What operators ask of the one who watches."""

    @property
    def where(self) -> str:
        """The module in which the forward is."""

    def dims(self, tensor: torch.Tensor) -> Dims:
        """The atoms of each dimension of a tensor."""

    def norms(self, dim: Dim) -> bool:
        """Whether a sum over a dimension is that of a norm which can be given a part of it."""


def handed_on(
    watch: Watcher, func: Any, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> Dims:
    """The dimensions of one result of an operator. What no rule knows needs the whole of everything that it takes."""
    handler = _HANDLERS.get(func.overloadpacket)
    if handler is not None:
        return handler(watch, result, args, kwargs)
    if torch.Tag.pointwise in func.tags:
        return _pointwise(watch, result, args, kwargs)
    for tensor in _tensors((*args, *kwargs.values())):
        refuse(watch.dims(tensor), f"it is an input of `{func.overloadpacket.__name__}`", watch.where)
    return [fresh(n) for n in result.shape]


def broadcast(watch: Watcher, shape: Sequence[int], tensors: Sequence[torch.Tensor]) -> Dims:
    """The dimensions of what tensors give element by element."""
    dims: Dims = []
    for back in range(len(shape), 0, -1):
        met: Dim = ()
        for tensor in tensors:
            if tensor.ndim >= back and tensor.shape[-back] != 1:
                own = watch.dims(tensor)[-back]
                met = align(met, own, watch.where) if met else own
        dims.append(met if shape[-back] != 1 else ())
    return dims


def contract(watch: Watcher, *dims: Dim) -> None:
    """Note that dimensions are summed over, or otherwise needed whole."""
    refuse([dim for dim in dims if not watch.norms(dim)], "the forward sums over it", watch.where)


def _handles(*packets: Any) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(packets, handler))
        return handler

    return add


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


@_handles(aten.native_dropout, aten.masked_fill, aten.where, aten.copy_, aten.lerp, aten.bernoulli)
def _pointwise(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    return broadcast(watch, result.shape, _tensors((*args, *kwargs.values())))


@_handles(
    aten.clone, aten.contiguous, aten.detach, aten._to_copy, aten.alias, aten.lift_fresh, aten.tril, aten.triu,
    aten.fill, aten.fill_, aten.zero_, aten.bernoulli_, aten.normal_, aten.uniform_,
    aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like,
)  # fmt: skip
def _same(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    return watch.dims(args[0])


@_handles(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full)
def _new(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    """A tensor of sizes that the code computes, from those of a rank's tensors where these are split: it is what it meets."""
    return [fresh(n, ARGUMENT, "a tensor that is not split") for n in result.shape]


@_handles(aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.unsqueeze, aten.squeeze)
def _view(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    if result.numel() != args[0].numel():  # of another dtype
        return [fresh(n) for n in result.shape]
    return view(watch.dims(args[0]), result.shape, watch.where)


@_handles(aten.permute)
def _permute(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    dims = watch.dims(args[0])
    return [dims[d] for d in args[1]]


@_handles(aten.transpose, aten.t)
def _transpose(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    dims = list(watch.dims(args[0]))
    one, other = args[1:3] if len(args) > 2 else (0, -1)
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    return dims


@_handles(aten.expand)
def _expand(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    given = args[0]
    dims: Dims = [()] * (result.ndim - given.ndim) + list(watch.dims(given))
    lead = [1] * (result.ndim - given.ndim) + list(given.shape)
    return [
        fresh(n, UNIFORM) if was == 1 else own for n, was, own in zip(result.shape, lead, dims, strict=True)
    ]


@_handles(aten.slice)
def _slice(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    given, dim = args[0], args[1] if len(args) > 1 else 0
    start, _, step = (*args[2:], None, None, None)[:3] if len(args) < 5 else args[2:5]
    dims, size = list(watch.dims(given)), given.shape[dim]
    if step not in (None, 1):
        dims[dim] = every_nth(dims[dim], step, start or 0, result.shape[dim], watch.where)
        return dims
    first = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
    dims[dim] = cut(dims[dim], first, first + result.shape[dim], watch.where)
    return dims


@_handles(aten.select)
def _select(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    dims = list(watch.dims(args[0]))
    refuse([dims.pop(args[1])], "one index of it is used", watch.where)
    return dims


@_handles(aten.index)
def _index(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    """Indices along one dimension, or along several that are beside each other; those along others are not followed."""
    dims, indices = list(watch.dims(args[0])), list(args[1])
    at = [d for d, index in enumerate(indices) if index is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in at) or at != list(range(at[0], at[-1] + 1)):
        refuse(dims, "it is an input of `index`", watch.where)
        return [fresh(n) for n in result.shape]
    taken = "some of its indices are used, and every rank would need them (with a linear of their own, the others could be split)"
    refuse([dims[d] for d in at], taken, watch.where)
    behind = dims[at[-1] + 1 :]
    made = result.shape[at[0] : result.ndim - len(behind)]
    return [*dims[: at[0]], *broadcast(watch, made, [indices[d] for d in at]), *behind]


@_handles(aten.view_as_complex)
def _as_complex(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    *dims, last = watch.dims(args[0])
    refuse([last], "it holds parts of complex numbers", watch.where)
    return dims


@_handles(aten.view_as_real)
def _as_real(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    return [*watch.dims(args[0]), fresh(2)]


@_handles(aten.stack)
def _stack(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    dim = (args[1] if len(args) > 1 else 0) % result.ndim
    shape = [n for d, n in enumerate(result.shape) if d != dim]
    dims = broadcast(watch, shape, args[0])
    return [*dims[:dim], fresh(result.shape[dim]), *dims[dim:]]


@_handles(aten.cat)
def _cat(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    parts = [t for t in args[0] if t.ndim == result.ndim]
    dim = (args[1] if len(args) > 1 else 0) % result.ndim
    refuse([watch.dims(t)[dim] for t in parts], "it is concatenated with another tensor", watch.where)
    shape = [1 if d == dim else n for d, n in enumerate(result.shape)]
    merged: Dims = []
    for d, n in enumerate(shape):
        met: Dim = ()
        for tensor in parts if n != 1 else ():
            own = watch.dims(tensor)[d]
            met = align(met, own, watch.where) if met else own
        merged.append(met)
    merged[dim] = fresh(result.shape[dim])
    return merged


@_handles(aten.mm, aten.bmm)
def _matmul(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    left, right = watch.dims(args[0]), watch.dims(args[1])
    refuse([left[-1], right[-2]], "the forward sums over it", watch.where)
    lead = [align(left[0], right[0], watch.where)] if result.ndim == 3 else []
    return [*lead, left[-2], right[-1]]


@_handles(aten._grouped_mm)
def _grouped_mm(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    """Rows [S, K] in groups, and matrices [G, K, N] for these, which are no parameter: [S, N]."""
    left, right = watch.dims(args[0]), watch.dims(args[1])
    refuse([left[-1], right[-2]], "the forward sums over it", watch.where)
    if result.ndim != 2 or args[1].ndim != 3:
        refuse([*left, *right], "it is an input of `_grouped_mm`", watch.where)
        return [fresh(n) for n in result.shape]
    return [left[0], right[-1]]


@_handles(aten.addmm, aten.baddbmm)
def _addmm(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    product = _matmul(watch, result, args[1:3], {})
    own = watch.dims(args[0])
    for back in range(1, len(own) + 1):
        if own[-back]:
            align(product[-back], own[-back], watch.where)
    return product


@_handles(aten._softmax, aten._log_softmax, aten.cumsum, aten.cumprod, aten.flip, aten.roll, aten.sort)
def _along(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    dims = watch.dims(args[0])
    along = args[1] if len(args) > 1 else -1
    for each in along if isinstance(along, list | tuple) else [along]:
        if isinstance(each, int) and dims:
            refuse([dims[each]], "an operator needs all of it", watch.where)
    return dims if list(map(size_of, dims)) == list(result.shape) else [fresh(n) for n in result.shape]


@_handles(
    aten.mean, aten.sum, aten.amax, aten.amin, aten.max, aten.min, aten.var, aten.std, aten.var_mean, aten.linalg_vector_norm,
    aten.argmax, aten.argmin, aten.any, aten.all, aten.prod, aten.norm, aten.logsumexp,
)  # fmt: skip
def _reduce(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    dims = watch.dims(args[0])
    kept = result.ndim == len(dims)
    given = next((a for a in args[1:] if isinstance(a, list | tuple)), kwargs.get("dim"))
    if given is None and len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
        given = [args[1]]
    over = [given] if isinstance(given, int) else given or list(range(len(dims)))
    gone = {d % len(dims) for d in over} if dims else set()
    contract(watch, *(dims[d] for d in gone))
    return [() if d in gone else own for d, own in enumerate(dims) if kept or d not in gone]


@_handles(aten.native_layer_norm, aten._fused_rms_norm)
def _norm(watch: Watcher, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Dims:
    dims = watch.dims(args[0])
    refuse(dims[len(dims) - len(args[1]) :], "the forward sums over it", watch.where)
    return (
        dims
        if result.ndim == len(dims) and result.numel() == args[0].numel()
        else [fresh(n) for n in result.shape]
    )


SAME_VALUES = frozenset({
    aten.clone, aten.contiguous, aten.detach, aten._to_copy, aten.alias, aten.view, aten._unsafe_view, aten.reshape, aten.expand,
    aten.unsqueeze, aten.squeeze,
})  # fmt: skip
"""Operators that give the values of a tensor, in other sizes or another dtype."""

PARTS = frozenset({aten.split, aten.split_with_sizes, aten.unbind})


def parts(
    watch: Watcher, func: Any, results: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Dims]:
    """The dimensions of each of the pieces that a tensor is taken apart into."""
    given, unbound = args[0], func.overloadpacket is aten.unbind
    at = 1 if unbound else 2
    dim = (args[at] if len(args) > at else kwargs.get("dim", 0)) % given.ndim
    found: list[Dims] = []
    start = 0
    for result in results:
        dims = list(watch.dims(given))
        if unbound:
            refuse([dims.pop(dim)], "one index of it is used", watch.where)
        else:
            stop = start + result.shape[dim]
            dims[dim] = cut(dims[dim], start, stop, watch.where)
            start = stop
        found.append(dims)
    return found
