"""The styles of the slot `params`: shard-params, and colwise, rowwise, sequence and replicate as torch's classes or as it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from parallelizer.placement import to_torch
from parallelizer.plan import AXES, REPLICATE, Flow, Placement, full_name, shard
from parallelizer.styles.base import ParamPlacements, Sharding, StyleError, Target, forward_names, implements, named_inputs
from parallelizer.styles.io import Layouts, check_flows, hook_layouts
from parallelizer.styles.local import run_on_locals
from parallelizer.styles.packing import Packing


TENSOR_AXES = ("ep", "tp")
"""The axes that parameters may be placed on by tensor styles."""


class ShardParams(ParallelStyle):
    """Any parameters of one module as DTensors on one or two axes.

    With layouts, forward runs on DTensors between them; without, on the local shards. `gradients` says how a replicated
    parameter's local gradient lies in the second case.
    """

    def __init__(
        self,
        params: ParamPlacements,
        *,
        axis: str = "tp",
        packed: Mapping[str, Packing] | None = None,
        divide: Mapping[str, int] | None = None,
        layouts: Layouts | None = None,
        gradients: type[TorchPlacement] = Partial,
    ) -> None:
        super().__init__()
        self.params, self.axis, self.packed = params, axis, packed or {}
        self.divide, self.layouts, self.gradients = divide or {}, layouts, gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = device_mesh.mesh_dim_names or (self.axis,)
        for name, by_axis in self.params.items():
            param = getattr(module, name)
            placements = [to_torch(by_axis.get(a, REPLICATE)) for a in names]
            data = param.detach()
            if name in self.packed:
                data = self.packed[name].pack(data)
            local = distribute_tensor(data, device_mesh, placements, src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(local, requires_grad=param.requires_grad))
        for name, degree in self.divide.items():
            setattr(module, name, getattr(module, name) // degree)
        if self.layouts is not None:
            hook_layouts(module, device_mesh, self.layouts, self.axis)
        else:
            run_on_locals(module, {n: self._gradient(by_axis, names) for n, by_axis in self.params.items()})
        return module

    def _gradient(self, by_axis: Mapping[str, Placement], names: tuple[str, ...]) -> list[TorchPlacement]:
        placements = [to_torch(by_axis.get(a, REPLICATE)) for a in names]
        return [self.gradients() if isinstance(p, Replicate) else p for p in placements]


@implements("shard-params")
def shard_params(target: Target) -> Sharding:
    """Parameters placed as written; `input` and `output` lay tensors out as for the prepare styles."""
    written = target.options.get("params") or {}
    if target.param is not None:
        if set(written) != {""}:
            raise StyleError("wrong-type", "the glob names a parameter, and `params` names others",
                             "write params: shard(0), or let the glob name the module", "params")
        written = {target.param: written[""]}
    elif "" in written:
        raise StyleError("wrong-type", "`params` does not say which parameter", "write params: {weight: shard(0)}", "params")
    params = {name: _on_axes(target, name, by_axis) for name, by_axis in written.items()}
    layouts = _layouts(target, named_inputs(target), target.options.get("output") or {})
    return _sharding(target, params, layouts)


@implements("colwise")
def colwise(target: Target) -> Sharding:
    """A linear's weight and bias sharded by output feature, an embedding's weight by column."""
    dims = {"weight": 1} if isinstance(target.module, nn.Embedding) else {"weight": 0, "bias": 0}
    flow_in, flow_out = _one_input(target, REPLICATE), _one_output(target, shard(-1))
    return _linear(target, dims, flow_in, flow_out, ColwiseParallel)


@implements("rowwise")
def rowwise(target: Target) -> Sharding:
    """A linear's weight sharded by input feature (its bias whole, added once), an embedding's by row."""
    embedding = isinstance(target.module, nn.Embedding)
    dims = {"weight": 0} if embedding else {"weight": 1, "bias": None}
    flow_in, flow_out = _one_input(target, REPLICATE if embedding else shard(-1)), _one_output(target, REPLICATE)
    return _linear(target, dims, flow_in, flow_out, RowwiseParallel)


@implements("sequence")
def sequence(target: Target) -> Sharding:
    """Runs on its rank's part of the sequence; parameters replicated, their gradients partial until reduced.

    With the layout `replicate` every rank runs on everything, and computes the same gradient.
    """
    layout = target.options.get("layout") or shard(1)
    params = {n: {target.axis: REPLICATE} for n, _ in target.module.named_parameters(recurse=False)}
    if any(True for child in target.module.children() for _ in child.parameters()):
        raise StyleError("style-module", f"{target.path} ({type(target.module).__name__}) has modules with parameters inside",
                         "give the rule to those modules")
    if layout.kind == "replicate":
        return Sharding(ShardParams(params, axis=target.axis, gradients=Replicate), (target.axis,), params)
    if layout.kind != "shard" or layout.dim is None:
        raise StyleError("unknown-placement", f"sequence cannot run on {layout}", "shard(1) or replicate", "layout")
    local = target.options.get("local")
    style = SequenceParallel(sequence_dim=layout.dim, use_local_output=False if local is None else local)
    return Sharding(style, (target.axis,), params)


@implements("replicate")
def replicate(target: Target) -> Sharding:
    """Parameters as replicated DTensors, forward on plain tensors; `grad` says whether gradients are summed over the axis."""
    names = [target.param] if target.param else [n for n, _ in target.module.named_parameters(recurse=False)]
    if not names:
        raise StyleError("style-module", f"{target.path} ({type(target.module).__name__}) has no parameters of its own",
                         "give the rule to the modules that have some")
    params = {n: {target.axis: REPLICATE} for n in names}
    gradients = Replicate if target.options.get("grad") == "replicate" else Partial
    return Sharding(ShardParams(params, axis=target.axis, gradients=gradients), (target.axis,), params)


def _linear(
    target: Target, dims: Mapping[str, int | None], flow_in: Flow, flow_out: Flow, torch_class: Any
) -> Sharding:
    """colwise and rowwise: torch's class where nothing but layouts is asked for, shard-params with dims filled in else."""
    module, axis = target.module, target.axis
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise StyleError(
            "style-module",
            f"{target.options['style']} knows nn.Linear and nn.Embedding; {target.path} is a {type(module).__name__}",
            "use shard-params and say which dimension: {style: shard-params, params: {weight: shard(0)}}",
        )
    own = {n for n, _ in module.named_parameters(recurse=False)}
    params = {n: {axis: REPLICATE if d is None else shard(d)} for n, d in dims.items() if n in own}
    local = target.options.get("local")
    if not target.options.get("packed") and not target.options.get("divide") and own == set(params):
        native = torch_class(
            input_layouts=to_torch(flow_in.arrives or REPLICATE),
            output_layouts=to_torch(flow_out.wanted or REPLICATE),
            use_local_output=True if local is None else local,
        )
        _check_sizes(target, params)
        return Sharding(native, (axis,), params)
    if target.options.get("packed"):
        _check_packed_layouts(target, flow_in, flow_out)
    name = next(iter(named_inputs(target)), None) or (forward_names(module) or ("",))[0]
    return _sharding(target, params, Layouts({name: flow_in}, {"": flow_out}, False, True if local is None else local))


def _check_packed_layouts(target: Target, flow_in: Flow, flow_out: Flow) -> None:
    """Packed features are in packed order: gathered or dealt out anew they would not be in their own."""
    flow, option = (flow_out.wanted, "output") if target.options["style"] == "colwise" else (flow_in.arrives, "input")
    if flow != shard(-1):
        raise StyleError("wrong-layout", f"the packed features of {target.path} cannot lie as {flow}", "leave them as shard(-1)", option)


def _one_input(target: Target, wanted: Placement) -> Flow:
    """The one input of a linear or an embedding: as written, wanted as the style needs it."""
    flows = named_inputs(target)
    if len(flows) > 1:
        raise StyleError("unknown-input", f"{type(target.module).__name__} has one input", None, "input")
    flow = next(iter(flows.values()), Flow())
    if flow.wanted is not None and flow.wanted != wanted:
        raise StyleError("wrong-layout", f"{target.options['style']} wants its input as {wanted}, the rule says {flow.wanted}",
                         f"write `input: {flow.arrives}`", "input")
    return Flow(flow.arrives or wanted, wanted)


def _one_output(target: Target, natural: Placement) -> Flow:
    flows: Mapping[str, Flow] = target.options.get("output") or {}
    if len(flows) > 1 or (flows and next(iter(flows)) not in ("", "0")):
        raise StyleError("unknown-input", f"{type(target.module).__name__} has one output", None, "output")
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
    _check_sizes(target, params)
    packed, divided = _packings(target, params), _divided(target)
    params = {n: {a: p for a, p in by_axis.items() if target.sizes[a] > 1} for n, by_axis in params.items()}
    used = {a for by_axis in params.values() for a in by_axis}
    if layouts is not None or divided:
        used.add(target.axis)
    style = ShardParams(
        params, axis=target.axis, packed=packed, divide={n: target.degree for n in divided}, layouts=layouts
    )
    return Sharding(style, tuple(a for a in AXES if a in used and target.sizes[a] > 1), params, packed, divided)


def _divided(target: Target) -> dict[str, int]:
    """The attributes to be divided, whole."""
    divided = {}
    for name in target.options.get("divide") or ():
        value = getattr(target.module, name, None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise StyleError("unknown-attribute", f"{target.path} has no whole number {name!r} to divide", None, "divide")
        if value % target.degree:
            raise _uneven(target, f"{target.path}.{name}", value, target.degree, "divide")
        divided[name] = value
    if divided and target.param is not None:
        raise StyleError("wrong-type", f"the glob names the parameter {target.param}, and `divide` takes attributes of a module",
                         "let the glob name the module", "divide")
    return divided


def _on_axes(target: Target, name: str, by_axis: Mapping[str, Placement]) -> dict[str, Placement]:
    own = dict(target.module.named_parameters(recurse=False))
    if name not in own:
        raise StyleError("unknown-parameter", f"{target.path or 'the root'} ({type(target.module).__name__}) has no parameter {name!r}",
                         f"it has {', '.join(own) or 'none of its own'}", "params")
    placements = {a or target.axis: p for a, p in by_axis.items()}
    for axis, placement in placements.items():
        if placement.kind == "partial":
            raise StyleError("unknown-placement", "a parameter is never partial", "replicate or shard(dim)", "params")
        if placement.dim is not None and not -own[name].ndim <= placement.dim < own[name].ndim:
            raise StyleError("unknown-dim", f"{name} has {own[name].ndim} dimensions, not one of number {placement.dim}",
                             f"its shape is {list(own[name].shape)}", "params")
        if axis not in TENSOR_AXES:
            raise StyleError("unknown-axis", f"parameters are not placed on {axis}", f"write {' or '.join(TENSOR_AXES)}; fsdp "
                             "shards over the data axes", "params")
    return {a: shard(p.dim % own[name].ndim) if p.dim is not None else p for a, p in placements.items()}


def _check_sizes(target: Target, params: ParamPlacements) -> None:
    """Every sharded dimension must divide by the product of the axes that shard it."""
    own = dict(target.module.named_parameters(recurse=False))
    for name, by_axis in params.items():
        for dim in {p.dim for p in by_axis.values() if p.dim is not None}:
            axes = [a for a, p in by_axis.items() if p.dim == dim]
            ranks, size = math.prod(target.sizes[a] for a in axes), own[name].shape[dim]
            if size % ranks:
                raise _uneven(target, f"dimension {dim} of {full_name(target.path, name)}", size, ranks, None, " x ".join(axes))


def _packings(target: Target, params: ParamPlacements) -> dict[str, Packing]:
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
        raise StyleError("unknown-attribute", f"{target.path} has no positive whole number {part!r}", None, "packed")
    return value


def _uneven(target: Target, what: str, size: int, ranks: int, option: str | None, axes: str | None = None) -> StyleError:
    legal = [n for n in range(1, min(size, 1024) + 1) if size % n == 0]
    shown = ", ".join(map(str, legal[:12])) + (", ..." if len(legal) > 12 else "")
    return StyleError("not-divisible", f"{what} is {size:,}, which {axes or target.axis}={ranks} does not divide",
                      f"sizes that divide it: {shown}", option)
