"""The requirements of a tensor style on one module: its parameters and attributes exist, and its sizes
divide. Raises StyleError.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.parse_options import argument_size
from parallelizer.language.plan import TENSOR_AXES, Placement, full_name, shard
from parallelizer.styles.attributes import is_writable, numbers, read
from parallelizer.styles.target import ParamPlacements, StyleError, Target, forward_names


def divided_attributes(target: Target) -> dict[str, int]:
    """The attributes to be divided, with their whole values; dotted names lead through what the module holds."""
    divided = _numbers(target, "divide", target.degree)
    if target.options.get("divide") and target.param is not None:
        raise StyleError(
            "wrong-type",
            f"the glob matches the parameter {target.param}, but `divide` takes attributes of a module",
            "match the module instead",
            "divide",
        )
    return divided


def group_attributes(target: Target, groups: int) -> dict[str, int]:
    """Those of `divide_groups`, which count the query heads of a key-value head that `groups` ranks share."""
    return _numbers(target, "divide_groups", groups)


def divided_argument_sizes(target: Target) -> dict[str, list[int]]:
    """The sizes of arguments among what is to be divided: dimensions by the argument's name. Whether they divide is only
    known when forward runs.
    """
    found: dict[str, list[int]] = {}
    for written in target.options.get("divide") or ():
        size = argument_size(written)
        if size is None:
            continue
        taken = forward_names(target.module) or tuple(inspect.signature(target.module.forward).parameters)
        if size[0] not in taken:
            raise StyleError(
                "unknown-attribute",
                f"forward of {target.path or 'the root'} ({type(target.module).__name__}) has no parameter {size[0]!r}",
                did_you_mean(size[0], list(taken), "it takes"),
                "divide",
            )
        found.setdefault(size[0], []).append(size[1])
    return found


def _numbers(target: Target, option: str, degree: int) -> dict[str, int]:
    divided = {}
    for name in target.options.get(option) or ():
        if argument_size(name) is not None:
            continue
        value = read(target.module, name)
        if value is None:
            raise StyleError(
                "unknown-attribute",
                f"{target.path} has no whole number {name!r} to divide",
                did_you_mean(name, numbers(target.module), "its whole numbers are"),
                option,
            )
        if not is_writable(target.module, name):
            raise StyleError(
                "unknown-attribute",
                f"{full_name(target.path, name)} cannot be set, so it cannot be divided",
                "divide the numbers that it is computed from; a number of another module needs a rule for that module",
                option,
            )
        if value % degree:
            raise uneven(target, full_name(target.path, name), value, degree, option)
        divided[name] = value
    return divided


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a module owns itself, then its buffers."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def on_axes(target: Target, name: str, by_axis: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placements of one parameter or buffer as written, by axis, with its dimensions counted from the front."""
    own = own_tensors(target.module)
    if name not in own:
        raise StyleError(
            "unknown-parameter",
            f"{target.path or 'the root'} ({type(target.module).__name__}) has no parameter or buffer {name!r}",
            f"it has {', '.join(own) or 'none of its own'}",
            "params",
            name,
        )
    placements = {a or target.axis: p for a, p in by_axis.items()}
    for axis, placement in placements.items():
        if placement.kind == "partial":
            raise StyleError(
                "unknown-placement",
                "a parameter cannot be partial",
                "write replicate or shard(dim)",
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
                f"parameters cannot be placed on {axis}",
                f"write {' or '.join(TENSOR_AXES)}; fsdp shards over the data axes",
                "params",
                f"{name}.{axis}" if target.param is None else axis,
            )
    return {a: shard(p.dim % own[name].ndim) if p.dim is not None else p for a, p in placements.items()}


def check_sizes(target: Target, params: ParamPlacements) -> None:
    """Every sharded dimension must divide by the product of the axes that shard it."""
    own = own_tensors(target.module)
    for name, by_axis in params.items():
        for dim in {p.dim for p in by_axis.values() if p.dim is not None}:
            axes = [a for a, p in by_axis.items() if p.dim == dim]
            ranks, size = math.prod(target.sizes[a] for a in axes), own[name].shape[dim]
            if size % ranks:
                raise uneven(
                    target,
                    f"dimension {dim} of {full_name(target.path, name)}",
                    size,
                    ranks,
                    None,
                    " x ".join(axes),
                )


def uneven(
    target: Target,
    what: str,
    size: int,
    ranks: int,
    option: str | None,
    axes: str | None = None,
    every: Iterable[int] = (),
) -> StyleError:
    """A size that the axis does not divide, with the sizes of the axis that divide it, and `every` as well."""
    axis = axes or target.axis
    sizes = (size, *every)
    return StyleError(
        "not-divisible",
        f"{what} is {size:,}, which {axis}={ranks} does not divide",
        dividing(axis, sizes),
        option,
        # Groups, or the sum of parts, are no axis.
        divided=(axis, sizes)
        if ranks == math.prod(target.sizes.get(a, 0) for a in axis.split(" x "))
        else None,
    )


def dividing(axis: str, sizes: Iterable[int]) -> str:
    """Help for an axis that must divide all of these sizes: those that it can have."""
    sizes = tuple(dict.fromkeys(sizes))
    common = math.gcd(*sizes)
    legal = [n for n in range(1, min(common, 1024) + 1) if common % n == 0]
    shown = ", ".join(map(str, legal[:12])) + (", ..." if len(legal) > 12 else "")
    named = ", ".join(f"{n:,}" for n in sizes[:6]) + (", ..." if len(sizes) > 6 else "")
    divisors = (
        f"the common divisors of the sizes that it splits: {named}"
        if len(sizes) > 1
        else f"the divisors of {named}"
    )
    return f"{axis} can be {shown} ({divisors})"
