"""The common part of `colwise` and `rowwise`: a linear or an embedding whose weight is sharded along
features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from parallelizer.language.placement import to_torch
from parallelizer.language.plan import REPLICATE, Flow, Placement, shard
from parallelizer.styles.feature_dims import FeatureDims, feature_dims
from parallelizer.styles.layouts import Layouts
from parallelizer.styles.prepare import check_flows
from parallelizer.styles.sharding import sharding_of
from parallelizer.styles.sizes import check_sizes
from parallelizer.styles.target import Sharding, StyleError, Target, forward_names, named_inputs


def known_feature_dims(target: Target) -> FeatureDims:
    """Which dimension of the module's weight is which. Raises StyleError for a module of another kind."""
    features = feature_dims(target.module)
    if features is None:
        raise StyleError(
            "style-module",
            f"{target.options['style']} knows nn.Linear, nn.Embedding and Conv1D, not {target.path} "
            f"({type(target.module).__name__})",
            "use shard-params and name the dimension: {style: shard-params, params: {weight: shard(0)}}",
        )
    return features


def linear(
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
    return sharding_of(
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
            f"the packed features of {target.path} cannot have the placement {flow}",
            "write shard(-1)",
            option,
            flow.span if flow else None,
        )


def one_input(target: Target, wanted: Placement) -> Flow:
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
            f"{target.options['style']} needs its input as {wanted}, but the rule says {flow.wanted}",
            f"write `input: {flow.arrives}`",
            "input",
            flow.wanted.span,
        )
    return Flow(flow.arrives or wanted, wanted)


def one_output(target: Target, natural: Placement) -> Flow:
    """The one output, as written or as the style makes it."""
    flows: Mapping[str, Flow] = target.options.get("output") or {}
    if len(flows) > 1 or (flows and next(iter(flows)) not in ("", "0")):
        raise StyleError(
            "unknown-input",
            f"{type(target.module).__name__} has one output",
            "write one placement, as in `output: replicate`",
            "output",
            next(name for name in flows if name not in ("", "0")),
        )
    flow = next(iter(flows.values()), Flow())
    check_flows(target, flows, "output")
    return Flow(None, flow.wanted or natural)
