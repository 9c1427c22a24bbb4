"""What a tensor style asks of one module: parameters and attributes that are there, and sizes that divide.
Raises StyleError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from parallelizer.plan import REPLICATE, Placement, full_name, shard
from parallelizer.styles.base import ParamPlacements, StyleError, Target
from parallelizer.styles.packing import Packing
from parallelizer.suggest import did_you_mean

TENSOR_AXES = ("ep", "tp")
"""The axes that parameters may be placed on by tensor styles."""


def divided_attributes(target: Target) -> dict[str, int]:
    """The attributes to be divided, whole."""
    divided = {}
    for name in target.options.get("divide") or ():
        value = getattr(target.module, name, None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise StyleError(
                "unknown-attribute",
                f"{target.path} has no whole number {name!r} to divide",
                _numbers(target, name),
                "divide",
            )
        if value % target.degree:
            raise _uneven(target, f"{target.path}.{name}", value, target.degree, "divide")
        divided[name] = value
    if divided and target.param is not None:
        raise StyleError(
            "wrong-type",
            f"the glob names the parameter {target.param}, and `divide` takes attributes of a module",
            "let the glob name the module",
            "divide",
        )
    return divided


def on_axes(target: Target, name: str, by_axis: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placements of one parameter as written, by axis, with its dimensions counted from the front."""
    own = dict(target.module.named_parameters(recurse=False))
    if name not in own:
        raise StyleError(
            "unknown-parameter",
            f"{target.path or 'the root'} ({type(target.module).__name__}) has no parameter {name!r}",
            f"it has {', '.join(own) or 'none of its own'}",
            "params",
            name,
        )
    placements = {a or target.axis: p for a, p in by_axis.items()}
    for axis, placement in placements.items():
        if placement.kind == "partial":
            raise StyleError(
                "unknown-placement",
                "a parameter is never partial",
                "replicate or shard(dim)",
                "params",
                placement.span,
            )
        if placement.dim is not None and not -own[name].ndim <= placement.dim < own[name].ndim:
            raise StyleError(
                "unknown-dim",
                f"{name} has {own[name].ndim} dimensions, not one of number {placement.dim}",
                f"its shape is {list(own[name].shape)}",
                "params",
                placement.span,
            )
        if axis not in TENSOR_AXES:
            raise StyleError(
                "unknown-axis",
                f"parameters are not placed on {axis}",
                f"write {' or '.join(TENSOR_AXES)}; fsdp shards over the data axes",
                "params",
                f"{name}.{axis}" if target.param is None else axis,
            )
    return {a: shard(p.dim % own[name].ndim) if p.dim is not None else p for a, p in placements.items()}


def check_sizes(target: Target, params: ParamPlacements) -> None:
    """Every sharded dimension must divide by the product of the axes that shard it."""
    own = dict(target.module.named_parameters(recurse=False))
    for name, by_axis in params.items():
        for dim in {p.dim for p in by_axis.values() if p.dim is not None}:
            axes = [a for a, p in by_axis.items() if p.dim == dim]
            ranks, size = math.prod(target.sizes[a] for a in axes), own[name].shape[dim]
            if size % ranks:
                raise _uneven(
                    target,
                    f"dimension {dim} of {full_name(target.path, name)}",
                    size,
                    ranks,
                    None,
                    " x ".join(axes),
                )


def packings(target: Target, params: ParamPlacements) -> dict[str, Packing]:
    """How the dimension that lies on the style's axis is packed, for each parameter that has one there."""
    written = target.options.get("packed") or ()
    values = [_part(target, part) for part in written]
    own = dict(target.module.named_parameters(recurse=False))
    packed = {}
    for name, by_axis in params.items():
        dim = by_axis.get(target.axis, REPLICATE).dim
        if dim is None or not values:
            continue
        axes = [a for a, p in by_axis.items() if p.dim == dim]
        ranks, over = math.prod(target.sizes[a] for a in axes), " x ".join(axes)
        what, size, total = full_name(target.path, name), own[name].shape[dim], sum(values)
        if size % total:
            raise _uneven(target, f"dimension {dim} of {what}", size, total, "packed", "the sum of its parts")
        sizes = tuple(size // total * value for value in values)
        for part, value, length in zip(written, values, sizes, strict=True):
            # A number of heads, say: its part may divide where it does not.
            if isinstance(part, str) and value % ranks:
                raise _uneven(target, full_name(target.path, part), value, ranks, "packed", over)
            if length % ranks:
                raise _uneven(target, f"a part of {what}", length, ranks, "packed", over)
        if ranks > 1:
            packed[name] = Packing(dim, sizes, ranks)
    return packed


def _part(target: Target, part: int | str) -> int:
    value = getattr(target.module, part, None) if isinstance(part, str) else part
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StyleError(
            "unknown-attribute",
            f"{target.path} has no positive whole number {part!r}",
            _numbers(target, str(part)),
            "packed",
        )
    return value


def _numbers(target: Target, name: str) -> str:
    """Help for an attribute that is no number: those that are."""
    known = [
        n
        for n, v in vars(target.module).items()
        if isinstance(v, int) and not isinstance(v, bool) and n[0] != "_"
    ]
    return did_you_mean(name, known, "its whole numbers are")


def _uneven(
    target: Target, what: str, size: int, ranks: int, option: str | None, axes: str | None = None
) -> StyleError:
    legal = [n for n in range(1, min(size, 1024) + 1) if size % n == 0]
    shown = ", ".join(map(str, legal[:12])) + (", ..." if len(legal) > 12 else "")
    return StyleError(
        "not-divisible",
        f"{what} is {size:,}, which {axes or target.axis}={ranks} does not divide",
        f"sizes that divide it: {shown}",
        option,
    )
