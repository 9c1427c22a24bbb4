"""The styles of the slot `params`: shard-params, and colwise, rowwise, sequence and replicate as torch's
classes or as it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)

from parallelizer.placement import to_torch
from parallelizer.plan import AXES, REPLICATE, Flow, Placement, full_name, shard
from parallelizer.styles.base import (
    ParamPlacements,
    Sharding,
    StyleError,
    Target,
    forward_names,
    implements,
    named_inputs,
)
from parallelizer.styles.io import Layouts, arrivals, check_flows
from parallelizer.styles.kv_heads import replicas, replicated
from parallelizer.styles.linears import FeatureDims, feature_dims
from parallelizer.styles.parts import packings
from parallelizer.styles.shard_params import ShardParams
from parallelizer.styles.sizes import check_sizes, divided_attributes, group_attributes, on_axes


@implements("shard-params")
def shard_params(target: Target) -> Sharding:
    """Parameters placed as written, and buffers seen so; `input` and `output` lay tensors out as for the prepare
    styles.
    """
    written = target.options.get("params") or {}
    if target.param is not None:
        if set(written) != {""}:
            raise StyleError(
                "wrong-type",
                "the glob names a parameter, and `params` names others",
                "write params: shard(0), or let the glob name the module",
                "params",
            )
        written = {target.param: written[""]}
    elif "" in written:
        raise StyleError(
            "wrong-type",
            "`params` does not say which parameter",
            "write params: {weight: shard(0)}",
            "params",
        )
    params = {name: on_axes(target, name, by_axis) for name, by_axis in written.items()}
    layouts = _layouts(target, named_inputs(target), target.options.get("output") or {})
    return _sharding(target, params, layouts)


@implements("colwise")
def colwise(target: Target) -> Sharding:
    """A linear's weight and bias sharded by output feature, an embedding's weight by column."""
    features = _feature_dims(target)
    dims = {"weight": features.outputs, "bias": 0}
    flow_in, flow_out = _one_input(target, REPLICATE), _one_output(target, shard(-1))
    if replicas(target) > 1:
        return replicated(target, dims, flow_in)
    return _linear(target, dims, flow_in, flow_out, ColwiseParallel)


@implements("rowwise")
def rowwise(target: Target) -> Sharding:
    """A linear's weight sharded by input feature (its bias whole, added once), an embedding's by row."""
    features = _feature_dims(target)
    dims = {"weight": features.inputs, "bias": None}
    flow_in, flow_out = (
        _one_input(target, REPLICATE if features.rows else shard(-1)),
        _one_output(target, REPLICATE),
    )
    return _linear(target, dims, flow_in, flow_out, RowwiseParallel)


@implements("sequence")
def sequence(target: Target) -> Sharding:
    """Runs on its rank's part of the sequence; parameters replicated, their gradients partial until reduced.

    With the layout `replicate` every rank runs on everything, and computes the same gradient.
    """
    layout = target.options.get("layout") or shard(1)
    params = {n: {target.axis: REPLICATE} for n, _ in target.module.named_parameters(recurse=False)}
    if any(True for child in target.module.children() for _ in child.parameters()):
        raise StyleError(
            "style-module",
            f"{target.path} ({type(target.module).__name__}) has modules with parameters inside",
            "give the rule to those modules",
        )
    if layout.kind == "replicate":
        return Sharding(ShardParams(params, axis=target.axis, gradients=Replicate), (target.axis,), params)
    if layout.kind != "shard" or layout.dim is None:
        raise StyleError(
            "unknown-placement",
            f"sequence cannot run on {layout}",
            "shard(1) or replicate",
            "layout",
            layout.span,
        )
    local = target.options.get("local")
    style = SequenceParallel(sequence_dim=layout.dim, use_local_output=False if local is None else local)
    return Sharding(style, (target.axis,), params, arrives={"": layout})


@implements("replicate")
def replicate(target: Target) -> Sharding:
    """Parameters as replicated DTensors, forward on plain tensors; `grad` says whether gradients are summed
    over the axis.
    """
    own = [n for n, _ in target.module.named_parameters(recurse=False)]
    if target.param is not None and target.param not in own:
        raise StyleError(
            "style-on-parameter",
            f"{full_name(target.path, target.param)} is a buffer, and replicate is for parameters",
            "leave the rule out: a buffer is the same on every rank unless shard-params slices it",
        )
    names = [target.param] if target.param else own
    if not names:
        raise StyleError(
            "style-module",
            f"{target.path} ({type(target.module).__name__}) has no parameters of its own",
            "give the rule to the modules that have some",
        )
    params = {n: {target.axis: REPLICATE} for n in names}
    gradients = Replicate if target.options.get("grad") == "replicate" else Partial
    return Sharding(ShardParams(params, axis=target.axis, gradients=gradients), (target.axis,), params)


def _feature_dims(target: Target) -> FeatureDims:
    """Which dimension of the module's weight is which. Raises StyleError for a module of another kind."""
    features = feature_dims(target.module)
    if features is None:
        raise StyleError(
            "style-module",
            f"{target.options['style']} knows nn.Linear, nn.Embedding and Conv1D, not {target.path} "
            f"({type(target.module).__name__})",
            "use shard-params and say which dimension: {style: shard-params, params: {weight: shard(0)}}",
        )
    return features


def _linear(
    target: Target, dims: Mapping[str, int | None], flow_in: Flow, flow_out: Flow, torch_class: Any
) -> Sharding:
    """colwise and rowwise: torch's class where nothing but layouts is asked for, shard-params with dims
    filled in else.
    """
    module, axis = target.module, target.axis
    own = {n for n, _ in module.named_parameters(recurse=False)}
    params = {n: {axis: REPLICATE if d is None else shard(d)} for n, d in dims.items() if n in own}
    local = target.options.get("local")
    known = isinstance(module, nn.Linear | nn.Embedding) and own == set(params)
    if known and not target.options.get("packed") and not target.options.get("divide"):
        native = torch_class(
            input_layouts=to_torch(flow_in.arrives or REPLICATE),
            output_layouts=to_torch(flow_out.wanted or REPLICATE),
            use_local_output=True if local is None else local,
        )
        check_sizes(target, params)
        return Sharding(native, (axis,), params, arrives={"": flow_in.arrives or REPLICATE})
    if target.options.get("packed"):
        _check_packed_layouts(target, flow_in, flow_out)
    name = next(iter(named_inputs(target)), None) or (forward_names(module) or ("",))[0]
    return _sharding(
        target, params, Layouts({name: flow_in}, {"": flow_out}, False, True if local is None else local)
    )


def _check_packed_layouts(target: Target, flow_in: Flow, flow_out: Flow) -> None:
    """Packed features are in packed order: gathered or dealt out anew they would not be in their own."""
    flow, option = (
        (flow_out.wanted, "output") if target.options["style"] == "colwise" else (flow_in.arrives, "input")
    )
    if flow != shard(-1):
        raise StyleError(
            "wrong-layout",
            f"the packed features of {target.path} cannot lie as {flow}",
            "leave them as shard(-1)",
            option,
            flow.span if flow else None,
        )


def _one_input(target: Target, wanted: Placement) -> Flow:
    """The one input of a linear or an embedding: as written, wanted as the style needs it."""
    flows = named_inputs(target)
    if len(flows) > 1:
        raise StyleError(
            "unknown-input",
            f"{type(target.module).__name__} has one input",
            f"name {(forward_names(target.module) or ('it',))[0]} only",
            "input",
            list(flows)[1],
        )
    flow = next(iter(flows.values()), Flow())
    if flow.wanted is not None and flow.wanted != wanted:
        raise StyleError(
            "wrong-layout",
            f"{target.options['style']} wants its input as {wanted}, the rule says {flow.wanted}",
            f"write `input: {flow.arrives}`",
            "input",
            flow.wanted.span,
        )
    return Flow(flow.arrives or wanted, wanted)


def _one_output(target: Target, natural: Placement) -> Flow:
    flows: Mapping[str, Flow] = target.options.get("output") or {}
    if len(flows) > 1 or (flows and next(iter(flows)) not in ("", "0")):
        raise StyleError(
            "unknown-input",
            f"{type(target.module).__name__} has one output",
            "write a placement alone, as in `output: replicate`",
            "output",
            next(name for name in flows if name not in ("", "0")),
        )
    flow = next(iter(flows.values()), Flow())
    check_flows(target, flows, "output")
    return Flow(None, flow.wanted or natural)


def _layouts(target: Target, inputs: Mapping[str, Flow], outputs: Mapping[str, Flow]) -> Layouts | None:
    if not inputs and not outputs:
        return None
    check_flows(target, inputs, "input")
    check_flows(target, outputs, "output")
    local = target.options.get("local")
    return Layouts(inputs, outputs, False, True if local is None else local)


def _sharding(target: Target, params: ParamPlacements, layouts: Layouts | None) -> Sharding:
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
    placed, seen = _above_1(target, params), _above_1(target, buffers)
    used = {a for by_axis in (*placed.values(), *seen.values()) for a in by_axis}
    if layouts is not None or divided:
        used.add(target.axis)
    style = ShardParams(
        placed,
        axis=target.axis,
        buffers=seen,
        packed=packed,
        divide={name: groups if name in shared else target.degree for name in divided},
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
