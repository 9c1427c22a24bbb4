"""The common result of shard-params and the styles of linears: checked placements and layouts, as a Sharding."""

from __future__ import annotations

from collections.abc import Mapping

from parallelizer.language.plan import AXES, Flow
from parallelizer.styles.kv_heads import replicas
from parallelizer.styles.layouts import Layouts, arrivals
from parallelizer.styles.packed_parts import packings
from parallelizer.styles.placed_parameters import ShardParams
from parallelizer.styles.prepare import check_flows
from parallelizer.styles.sizes import (
    check_sizes,
    divided_argument_sizes,
    divided_attributes,
    group_attributes,
)
from parallelizer.styles.target import ParamPlacements, Sharding, Target


def layouts_of(target: Target, inputs: Mapping[str, Flow], outputs: Mapping[str, Flow]) -> Layouts | None:
    """Inputs and outputs laid out anew around forward on DTensors; None where nothing is said of them."""
    if not inputs and not outputs:
        return None
    check_flows(target, inputs, "input")
    check_flows(target, outputs, "output")
    local = target.options.get("local")
    return Layouts(inputs, outputs, False, True if local is None else local)


def sharding_of(target: Target, params: ParamPlacements, layouts: Layouts | None) -> Sharding:
    """Parameters and buffers placed so, forward on DTensors between the layouts if there are some. Raises StyleError."""
    if layouts is not None and target.param is None:
        # Forward runs on DTensors, which do not mix with plain tensors: what is not named is replicated.
        params = {**{n: {} for n, _ in target.module.named_parameters(recurse=False)}, **params}
    check_sizes(target, params)
    own = {n for n, _ in target.module.named_parameters(recurse=False)}
    buffers = {n: by_axis for n, by_axis in params.items() if n not in own}
    params = {n: by_axis for n, by_axis in params.items() if n in own}
    packed, groups, shared = (
        packings(target, params),
        replicas(target),
        target.options.get("divide_groups") or (),
    )
    divided = {**divided_attributes(target), **(group_attributes(target, groups) if groups > 1 else {})}
    sizes = divided_argument_sizes(target)
    placed, seen = _above_1(target, params), _above_1(target, buffers)
    used = {a for by_axis in (*placed.values(), *seen.values()) for a in by_axis}
    if layouts is not None or divided or sizes:
        used.add(target.axis)
    style = ShardParams(
        placed,
        axis=target.axis,
        buffers=seen,
        packed=packed,
        divide={name: groups if name in shared else target.degree for name in divided},
        divide_sizes=sizes if target.degree > 1 else {},
        layouts=layouts,
    )
    return Sharding(
        style,
        tuple(a for a in AXES if a in used and target.sizes[a] > 1),
        placed,
        seen,
        packed,
        divided,
        arrivals(layouts.input) if layouts is not None else {},
    )


def _above_1(target: Target, placements: ParamPlacements) -> ParamPlacements:
    """Placements without the axes of size 1."""
    return {n: {a: p for a, p in by_axis.items() if target.sizes[a] > 1} for n, by_axis in placements.items()}
