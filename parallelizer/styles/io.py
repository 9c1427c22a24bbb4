"""prepare-input, prepare-output, prepare-io: how tensors arrive at a module and how they leave it.

Torch's PrepareModuleInput wants the positional and the keyword arguments of each call spelled out; ours binds names by the
signature of forward, so that both ways of calling match one rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.placement import to_torch
from parallelizer.plan import Flow, Placement
from parallelizer.styles.base import Sharding, StyleError, Target, implements, named_inputs


@dataclass(frozen=True)
class Layouts:
    """Flows with every placement resolved, and whether plain tensors are handed on."""

    input: Mapping[str, Flow] = field(default_factory=dict)
    output: Mapping[str, Flow] = field(default_factory=dict)
    local_input: bool = False
    local_output: bool = True


class PrepareIO(ParallelStyle):
    """Inputs and outputs of one module laid out anew on one axis, by torch's DTensor redistribution."""

    def __init__(self, layouts: Layouts, axis: str) -> None:
        super().__init__()
        self.layouts, self.axis = layouts, axis

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hook_layouts(module, device_mesh, self.layouts, self.axis)
        return module


class SplitSequence(ParallelStyle):
    """Inputs and outputs split or gathered over the context-parallel axis, in the balanced order."""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__()
        self.layouts = layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from parallelizer.context.sequence import relay

        group = device_mesh.get_group()
        if self.layouts.input:
            _hook_inputs(module, self.layouts.input, lambda x, flow: relay(x, flow, group))
        if self.layouts.output:
            _hook_outputs(module, self.layouts.output, lambda x, flow: relay(x, flow, group))
        return module


def hook_layouts(module: nn.Module, mesh: DeviceMesh, layouts: Layouts, axis: str) -> None:
    """Register the hooks that turn arriving tensors into DTensors as wanted, and outputs back."""
    names = mesh.mesh_dim_names or (axis,)
    index = names.index(axis)

    def place(placement: Placement) -> list[Any]:
        placements: list[Any] = [Replicate()] * mesh.ndim
        placements[index] = to_torch(placement)
        return placements

    def convert(tensor: torch.Tensor, flow: Flow, local: bool) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            arrives = place(flow.arrives) if flow.arrives else [Replicate()] * mesh.ndim
            tensor = DTensor.from_local(tensor, mesh, arrives, run_check=False)
        if flow.wanted is not None:
            tensor = tensor.redistribute(placements=place(flow.wanted))
        return tensor.to_local() if local else tensor

    if layouts.input:
        _hook_inputs(module, layouts.input, lambda x, flow: convert(x, flow, layouts.local_input))
    if layouts.output:
        _hook_outputs(module, layouts.output, lambda x, flow: convert(x, flow, layouts.local_output))


def _hook_inputs(module: nn.Module, flows: Mapping[str, Flow], convert: Any) -> None:
    signature = inspect.signature(module.forward)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "" in flows:  # forward takes *args: the first positional one
            return (convert(args[0], flows[""]), *args[1:]), kwargs
        bound = signature.bind(*args, **kwargs)
        for name, flow in flows.items():
            if isinstance(bound.arguments.get(name), torch.Tensor):
                bound.arguments[name] = convert(bound.arguments[name], flow)
        return bound.args, bound.kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _hook_outputs(module: nn.Module, flows: Mapping[str, Flow], convert: Any) -> None:
    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for key, flow in flows.items():
            output = _replaced(output, key, lambda x, flow=flow: convert(x, flow), module)
        return output

    module.register_forward_hook(after)


def _replaced(output: Any, key: str, convert: Any, module: nn.Module) -> Any:
    """The output with one tensor in it converted; the container is copied, never changed in place."""
    if isinstance(output, torch.Tensor) and key in ("", "0"):
        return convert(output)
    if isinstance(output, tuple | list) and (key == "" or key.isdigit()):
        index = int(key or 0)
        if index < len(output):
            items = [convert(x) if i == index else x for i, x in enumerate(output)]
            return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, dict):
        name = key if key else next(iter(output), "")
        if name in output:
            import copy

            changed = copy.copy(output)
            changed[name] = convert(output[name])
            return changed
    raise RuntimeError(f"the output of {type(module).__name__} ({type(output).__name__}) has no entry {key!r} that a plan's "
                       f"`output` names")


def check_flows(target: Target, flows: Mapping[str, Flow], option: str) -> None:
    """Refuse what a redistribution cannot do: making something partial out of what is not. Raises StyleError."""
    for flow in flows.values():
        if flow.wanted is not None and flow.wanted.kind == "partial" and (flow.arrives is None or flow.arrives.kind != "partial"):
            raise StyleError("unknown-placement", f"`{flow}` wants a partial tensor", "partial is a way to arrive, not to leave", option)


def _prepare(target: Target, inputs: bool, outputs: bool) -> Sharding:
    options = target.options
    local = options.get("local")
    layouts = Layouts(
        input=named_inputs(target) if inputs else {},
        output=options.get("output") or {} if outputs else {},
        local_input=bool(options.get("local_input", local if not outputs else False)),
        local_output=True if local is None else local,
    )
    missing = [o for o, on in (("input", inputs), ("output", outputs)) if on and not getattr(layouts, o)]
    if len(missing) == inputs + outputs:
        raise StyleError("missing-option", f"the rule does not say which {' or '.join(missing)}",
                         f"write {missing[0]}: {{x: shard(1) -> replicate}}")
    check_flows(target, layouts.input, "input")
    check_flows(target, layouts.output, "output")
    if target.axis == "cp":
        return Sharding(SplitSequence(layouts), ("cp",))
    return Sharding(PrepareIO(layouts, target.axis), (target.axis,))


@implements("prepare-input")
def prepare_input(target: Target) -> Sharding:
    """Inputs arrive so and are wanted so; plain tensors are handed on only with `local: true`."""
    return _prepare(target, True, False)


@implements("prepare-output")
def prepare_output(target: Target) -> Sharding:
    """Outputs come out so and leave so, as plain tensors unless `local: false`."""
    return _prepare(target, False, True)


@implements("prepare-io")
def prepare_io(target: Target) -> Sharding:
    """Both; `local` is for the outputs, `local_input` for the inputs, as in torch's PrepareModuleInputOutput."""
    return _prepare(target, True, True)

