"""How a plain tensor lies over one axis, from operator to operator: cut along a dimension, or as terms of a sum.

A rank that computes on its part alone gets its part of the result, as long as no operator looks along the cut: a
mean over it, a shift, a softmax want the whole. That is what `after` tells, one operator at a time. What it has no
rule for it knows nothing of afterwards, so that it never accuses what may be right.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Part:
    """Each rank holds a run of the whole along `dim`. What is cut are `size` elements here (not counting others that
    a view has merged into the dimension: `outer` in front of them, and the rest behind). `features` says that
    it was the last dimension of what a module returned, `packed` which module's, where that was split part by part
    and nothing has taken the parts from each other yet.
    """

    dim: int
    size: int
    outer: int = 1
    features: bool = False
    packed: str = ""

    def moved(self, dim: int) -> Part:
        """The same of another dimension."""
        return dataclasses.replace(self, dim=dim)


@dataclass(frozen=True)
class Terms:
    """Each rank holds a term, and the value is their sum."""


Lay = Part | Terms
LayOf = Callable[[Tensor], Lay | None]


class NeedsWhole(Exception):
    """An operator looks along a dimension that is cut, or uses a sum before its terms are added up."""


class TakesApart(Exception):
    """An operator takes apart the features that are followed, into parts that are to each other as `sizes`; these are empty
    where only some of the features are taken.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.sizes = in_proportion(sizes)


def in_proportion(sizes: Sequence[int]) -> tuple[int, ...]:
    """The smallest whole numbers that are to each other as the sizes."""
    divisor = max(1, math.gcd(*sizes))
    return tuple(size // divisor for size in sizes)


@dataclass(frozen=True)
class Call:
    """One operator being run: positional arguments as its schema names them, and what came out. `sums` says that terms
    of a sum may still be added up further on, `features` that a projection's output features are followed, to be told where
    they are taken apart.
    """

    func: Any
    args: Sequence[Any]
    made: Sequence[Tensor]
    lay: LayOf
    sums: bool
    features: bool = False

    @property
    def name(self) -> str:
        """Without namespace and overload, and without the underscore of what works in place."""
        name: str = self.func._schema.name.partition("::")[2]
        return name if name.startswith("_") else name.removesuffix("_")

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument of that name, `default` where the call left it out."""
        for declared, value in zip(self.func._schema.arguments, self.args, strict=False):
            if declared.name == name:
                return value
        return default

    def dims(self, ndim: int) -> list[int]:
        """The dimensions that it works along; all where none are given."""
        given = self.argument("dim", self.argument("dims", self._default()))
        if given is None or given == []:
            return list(range(ndim))
        return [d % ndim for d in ([given] if isinstance(given, int) else given)] if ndim else []

    def _default(self) -> Any:
        declared = next((a for a in self.func._schema.arguments if a.name in ("dim", "dims")), None)
        return declared.default_value if declared is not None and declared.has_default_value() else None

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, lists of them too."""
        found: list[Tensor] = []
        for value in self.args:
            found += [
                v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Tensor)
            ]
        return found


def after(call: Call) -> Lay | None:
    """How the results lie; None where that is not known, or they are alike on every rank.

    Raises NeedsWhole where a rank's part gives no part of the result, and TakesApart of features that are followed, as long
    as it is features that are handed on.
    """
    if not call.made or not any(call.lay(t) for t in call.tensors()):
        return None
    if call.features and not _hands_on(call):
        return None
    if torch.Tag.pointwise in call.func.tags or call.name in _POINTWISE:
        return _pointwise(call)
    rule = _RULES.get(call.name)
    if rule is None:
        rule = next((r for start, r in _FAMILIES if call.name.startswith(start)), None)
    return rule(call) if rule is not None else None


_POINTWISE = (
    "clone",
    "contiguous",
    "alias",
    "detach",
    "_to_copy",
    "copy",
    "native_dropout",
    "lift_fresh",
    "expand",
)
_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
_PERMUTES = ("permute", "transpose", "t")
_TAKES = ("select", "slice", "split", "split_with_sizes", "unbind", "glu")
_LINEAR = ("clone", "contiguous", "alias", "detach", "_to_copy", "copy", "expand", "neg", "lift_fresh")


def _hands_on(call: Call) -> bool:
    """Whether what comes out are the elements that went in, each changed by itself."""
    return (
        torch.Tag.pointwise in call.func.tags
        or call.name in (*_POINTWISE, *_VIEWS, *_PERMUTES, "unsqueeze", "squeeze")
        or (call.name in _TAKES and bool(call.lay(call.tensors()[0])))
    )


def _pointwise(call: Call) -> Lay | None:
    read, out = call.tensors(), call.made[0]
    if any(isinstance(call.lay(t), Terms) for t in read):
        return _on_terms(call, read)
    found: set[Part | None] = set()
    for tensor in read:
        part = call.lay(tensor)
        if isinstance(part, Part):
            dim = out.ndim - tensor.ndim + part.dim
            found.add(part.moved(dim) if tensor.shape[part.dim] == out.shape[dim] else None)
    if len({part and dataclasses.replace(part, packed="") for part in found}) != 1:
        return None
    return max(found, key=lambda part: part.packed if part else "")  # packed meets packed: still so


def _on_terms(call: Call, read: Sequence[Tensor]) -> Lay | None:
    """A sum of terms goes through what is linear in it, and is needed whole by everything else."""
    others = [t for t in read if not isinstance(call.lay(t), Terms)]
    terms = len(read) - len(others)
    if call.name in _LINEAR:
        return Terms()
    if call.name in ("add", "sub") and not others:
        number = call.argument("other")
        if terms > 1 or number == 0:
            return Terms()
    scaled = call.name == "mul" or (call.name == "div" and isinstance(call.lay(read[0]), Terms))
    if scaled and terms == 1 and not any(call.lay(t) for t in others):
        return Terms()
    raise NeedsWhole


def _along(call: Call) -> Lay | None:
    """Works along dimensions, and needs the whole of each."""
    first = call.tensors()[0]
    lay = call.lay(first)
    if lay is None:
        return None
    dims = _normalized(call, first.ndim) if call.name in _NORMALIZED else call.dims(first.ndim)
    if isinstance(lay, Terms):
        if call.name in ("mean", "flip", "roll", "cumsum"):
            return lay
        raise NeedsWhole
    if lay.dim in dims:
        raise NeedsWhole
    return _reduced(call, lay, first, dims)


_NORMALIZED = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")


def _group_norm(call: Call) -> Lay | None:
    """Over channels in groups, whose number is that of the whole: every dimension but the batch's."""
    lay = call.lay(call.tensors()[0])
    if isinstance(lay, Terms) or (lay is not None and lay.dim > 0):
        raise NeedsWhole
    return lay


def _normalized(call: Call, ndim: int) -> list[int]:
    return list(range(ndim - len(call.argument("normalized_shape")), ndim))


def _reduced(call: Call, part: Part, before: Tensor, dims: Sequence[int]) -> Part:
    """The part after dimensions other than its own were reduced, or worked along and kept."""
    gone = sum(d < part.dim for d in dims) if call.made[0].ndim < before.ndim else 0
    return part.moved(part.dim - gone)


def _sum(call: Call) -> Lay | None:
    first = call.tensors()[0]
    lay, dims = call.lay(first), call.dims(first.ndim)
    if not isinstance(lay, Part):
        return lay
    if lay.dim not in dims:
        return _reduced(call, lay, first, dims)
    return _summed_over(call)


def _summed_over(call: Call) -> Lay:
    if call.sums:
        return Terms()
    raise NeedsWhole


def _view(call: Call) -> Lay | None:
    first = call.tensors()[0]
    lay = call.lay(first)
    if not isinstance(lay, Part):
        return lay
    return viewed(first.shape, call.made[0].shape, lay, features=call.features)


def viewed(before: Sequence[int], after: Sequence[int], part: Part, *, features: bool = False) -> Part | None:
    """Where a part is after a view, which keeps the order of elements: as far behind the first as before.

    Of a dimension that is taken apart, the first factor is what is cut. None where that cannot be told: in [1, 128]
    out of 128 it may be a rank's only head, or a dimension that was put in. Of `features` that are followed it is taken for
    put in where the next dimension has not all of them.
    """
    if tuple(before) == tuple(after):
        return part
    ahead, passed = math.prod(before[: part.dim]) * part.outer, 1
    if part.size <= 1:
        return None
    for dim, size in enumerate(after):
        if not passed <= ahead < passed * size or size == 1:
            passed *= size
            continue
        outer = ahead // passed
        put_in = _ones_before(after, dim) > _ones_before(before, part.dim)
        put_in = put_in and not (features and size != before[part.dim])
        if ahead % passed or size % outer or put_in:
            return None
        inside = size // outer
        if inside % part.size and part.size % inside:
            return None
        return dataclasses.replace(part, dim=dim, size=min(inside, part.size), outer=outer)
    return None


def _ones_before(shape: Sequence[int], dim: int) -> int:
    count = 0
    while dim - count > 0 and shape[dim - count - 1] == 1:
        count += 1
    return count


def _permute(call: Call) -> Lay | None:
    first = call.tensors()[0]
    lay = call.lay(first)
    if not isinstance(lay, Part):
        return lay
    order = list(range(first.ndim))
    if call.name == "permute":
        order = [d % first.ndim for d in call.args[1]]
    elif call.name == "transpose":
        a, b = (d % first.ndim for d in call.args[1:3])
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return lay.moved(order.index(lay.dim))


def _unsqueeze(call: Call) -> Lay | None:
    first = call.tensors()[0]
    lay = call.lay(first)
    if not isinstance(lay, Part):
        return lay
    new = call.argument("dim") % (first.ndim + 1)
    return lay.moved(lay.dim + (new <= lay.dim))


def _squeeze(call: Call) -> Lay | None:
    first = call.tensors()[0]
    lay = call.lay(first)
    if not isinstance(lay, Part):
        return lay
    gone = [d for d in call.dims(first.ndim) if first.shape[d] == 1]
    return None if lay.dim in gone else lay.moved(lay.dim - sum(d < lay.dim for d in gone))


def _take(call: Call) -> Lay | None:
    """Takes something at certain places of one dimension. Of features that may be right, where they are packed."""
    first = call.tensors()[0]
    lay = call.lay(first)
    if not isinstance(lay, Part):
        return lay
    dim = call.argument("dim", -1 if call.name == "glu" else 0) % first.ndim
    removed = call.name in ("select", "unbind")
    if dim != lay.dim:
        return lay.moved(lay.dim - (removed and dim < lay.dim))
    if not removed and call.made[0].shape == first.shape:
        return lay
    step = call.argument("step", 1)
    if (
        call.name == "slice"
        and step > 1
        and call.made[0].shape[dim] * step == first.shape[dim]
        and lay.outer == 1
    ):
        return dataclasses.replace(lay, size=lay.size // step) if lay.size == first.shape[dim] else None
    if call.features and lay.outer == 1:
        raise TakesApart(_taken(call, first, dim))
    if lay.features or call.features:
        return None
    raise NeedsWhole


def _taken(call: Call, whole: Tensor, dim: int) -> Sequence[int]:
    """The sizes of all parts that a dimension is taken apart into; none where only some of it is taken."""
    if call.name == "glu":
        return 1, 1
    if call.name == "unbind":
        return (1,) * whole.shape[dim]
    return tuple(t.shape[dim] for t in call.made) if len(call.made) > 1 else ()


def _cat(call: Call) -> Lay | None:
    full = [t for t in call.tensors() if t.numel()]
    lays = {lay for t in full if (lay := call.lay(t)) is not None}
    dim = call.argument("dim", 0) % call.made[0].ndim
    if len(lays) != 1:
        return None
    (lay,) = lays
    if isinstance(lay, Terms):
        return lay if all(call.lay(t) for t in full) else None
    if call.name == "stack":
        return lay.moved(lay.dim + (dim <= lay.dim))
    if lay.dim != dim or len(full) == 1:
        return lay
    if lay.features:
        return None
    raise NeedsWhole


def _pad(call: Call) -> Lay | None:
    first, pad = call.tensors()[0], call.argument("pad")
    lay = call.lay(first)
    if isinstance(lay, Part) and any(pad[2 * (first.ndim - 1 - lay.dim) :][:2]):
        raise NeedsWhole
    return lay if isinstance(lay, Part) else None


def _matmul(call: Call) -> Lay | None:
    *bias, a, b = call.tensors()
    left, right, last = call.lay(a), call.lay(b), a.ndim - 1
    if isinstance(left, Terms) or isinstance(right, Terms):
        return _with_bias(call, bias, Terms()) if not (left and right) else None
    inner = [part is not None and part.dim == dim for part, dim in ((left, last), (right, last - 1))]
    if all(inner):
        return _with_bias(call, bias, _summed_over(call))
    if any(inner):
        return None
    outer = [p for p in (left, right) if p is not None]
    if len({p.dim for p in outer}) > 1:
        raise NeedsWhole  # a rank would have only the block of its own rows and its own columns
    return outer[0] if outer else None


def _with_bias(call: Call, bias: Sequence[Tensor], product: Lay) -> Lay:
    """A product of terms, with what `addmm` adds to it: a whole bias would be in the sum once for each rank."""
    if bias and not isinstance(call.lay(bias[0]), Terms):
        raise NeedsWhole
    return product


def _attention(call: Call) -> Lay | None:
    query, key, value = call.tensors()[:3]
    lays = [call.lay(t) for t in (query, key, value)]
    if any(isinstance(lay, Terms) for lay in lays):
        raise NeedsWhole
    q, k, v = (lay if isinstance(lay, Part) else None for lay in lays)
    rows, features = query.ndim - 2, query.ndim - 1
    own_rows = (k and k.dim == rows) or (v and v.dim == rows)
    if (own_rows and call.sums) or (q and k and q.dim == k.dim == features):
        raise NeedsWhole  # of a sequence that is split, whoever watches attention itself says so
    return q if q is not None and q.dim != features else None


def _convolution(call: Call) -> Lay | None:
    first, weight = call.tensors()[:2]
    lay = call.lay(first)
    if not isinstance(lay, Part) or lay.dim == 1:
        return None
    if lay.dim > 1 and weight.shape[lay.dim] > 1:
        raise NeedsWhole
    return lay


def _pooling(call: Call) -> Lay | None:
    lay = call.lay(call.tensors()[0])
    if isinstance(lay, Part) and lay.dim >= 2:
        kernel = call.argument("kernel_size", ())
        if not kernel or any(size > 1 for size in ([kernel] if isinstance(kernel, int) else kernel)):
            raise NeedsWhole
    return lay if isinstance(lay, Part) else None


def _sort(call: Call) -> Lay | None:
    """Whole numbers are sorted to group rows by them, as tokens by their expert, which each rank does with its own."""
    return _along(call) if call.tensors()[0].is_floating_point() else None


def _triangle(call: Call) -> Lay | None:
    first = call.tensors()[0]
    lay = call.lay(first)
    if isinstance(lay, Part) and lay.dim >= first.ndim - 2:
        raise NeedsWhole
    return lay


def _embedding(call: Call) -> Lay | None:
    weight, indices = call.tensors()[:2]
    rows, table = call.lay(indices), call.lay(weight)
    if isinstance(rows, Part) and table is None:
        return rows
    if rows is None and isinstance(table, Part) and table.dim == 1:
        return table.moved(call.made[0].ndim - 1)
    return None


def _window(call: Call) -> Lay | None:
    first = call.tensors()[0]
    lay = call.lay(first)
    if (
        isinstance(lay, Part)
        and lay.dim == call.argument("dimension") % first.ndim
        and call.argument("size") > 1
    ):
        raise NeedsWhole
    return lay


_RULES: dict[str, Callable[[Call], Lay | None]] = {
    **dict.fromkeys(
        ("mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "var", "std", "var_mean", "std_mean",
         "logsumexp", "norm", "linalg_vector_norm", "median", "mode", "kthvalue", "cumsum", "cumprod", "cummax",
         "cummin", "logcumsumexp", "_softmax", "_log_softmax", "_safe_softmax", "topk", "flip", "roll",
         "_fft_r2c", "_fft_c2c", "_fft_c2r", *_NORMALIZED),
        _along,
    ),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_PERMUTES, _permute),
    **dict.fromkeys(_TAKES, _take),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _matmul),
    **dict.fromkeys(("tril", "triu"), _triangle),
    "native_group_norm": _group_norm,
    "sort": _sort,
    "sum": _sum,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "constant_pad_nd": _pad,
    "convolution": _convolution,
    "embedding": _embedding,
    "unfold": _window,
}  # fmt: skip
_FAMILIES = (
    ("_scaled_dot_product", _attention),
    ("scaled_dot_product_attention", _attention),
    ("avg_pool", _pooling),
    ("max_pool", _pooling),
    ("_adaptive_avg_pool", _pooling),
    ("adaptive_", _pooling),
)
