"""The option `packed`: the parts of a fused dimension, as integers. Raises StyleError.

A part is a ratio, or the name of a number of the module or of a module around it: often only the attention
module, or its configuration, stores the numbers of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.plan import REPLICATE, Placement, full_name
from parallelizer.styles.attributes import nearest_number, numbers
from parallelizer.styles.packing import Packing
from parallelizer.styles.sizes import uneven
from parallelizer.styles.target import ParamPlacements, StyleError, Target

Parts = Sequence[int | str]


def packings(target: Target, params: ParamPlacements) -> dict[str, Packing]:
    """How the dimension that lies on the style's axis is packed, for each parameter that has one there.

    A list of parts is for all of them, a map for those that it names.
    """
    written = target.options.get("packed") or ()
    by_name: Mapping[str, Parts] = written if isinstance(written, Mapping) else dict.fromkeys(params, written)
    packed = {}
    for name, parts in by_name.items():
        dim = params.get(name, {}).get(target.axis, REPLICATE).dim
        if isinstance(written, Mapping) and dim is None:
            raise StyleError(
                "unknown-parameter",
                f"`packed` names {name!r}, which the rule does not shard over {target.axis}",
                f"it shards {', '.join(_sharded(target, params)) or 'nothing'} there",
                "packed",
                name,
            )
        if dim is not None and parts:
            packing = _packing(target, name, params[name], dim, parts)
            if packing.ranks > 1:
                packed[name] = packing
    return packed


def _packing(target: Target, name: str, by_axis: Mapping[str, Placement], dim: int, parts: Parts) -> Packing:
    axes = [a for a, p in by_axis.items() if p.dim == dim]
    ranks, over = math.prod(target.sizes[a] for a in axes), " x ".join(axes)
    values = [_part(target, part) for part in parts]
    what, size = full_name(target.path, name), target.module.get_parameter(name).shape[dim]
    total = sum(values)
    if size % total:
        raise uneven(target, f"dimension {dim} of {what}", size, total, "packed", "the sum of its parts")
    sizes = tuple(size // total * value for value in values)
    # A number of heads, say: its part may divide where it does not.
    named = [v for p, v in zip(parts, values, strict=True) if isinstance(p, str)]
    for part, value, length in zip(parts, values, sizes, strict=True):
        if isinstance(part, str) and value % ranks:
            raise uneven(target, f"the part {part} of {what}", value, ranks, "packed", over, named)
        if length % ranks:
            raise uneven(target, f"a part of {what}", length, ranks, "packed", over, sizes)
    return Packing(dim, sizes, ranks)


def _part(target: Target, part: int | str) -> int:
    if isinstance(part, int):
        return part
    value = nearest_number((target.module, *target.around), part)
    if value is None or value < 1:
        known = [n for m in (target.module, *target.around) for n in numbers(m)]
        raise StyleError(
            "unknown-attribute",
            f"{target.path} has no positive whole number {part!r}, and neither has a module around it",
            did_you_mean(part, list(dict.fromkeys(known)), "the whole numbers there are"),
            "packed",
        )
    return value


def _sharded(target: Target, params: ParamPlacements) -> list[str]:
    return [n for n, by_axis in params.items() if by_axis.get(target.axis, REPLICATE).dim is not None]
