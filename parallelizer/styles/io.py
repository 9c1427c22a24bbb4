"""prepare-input, prepare-output, prepare-io: how tensors arrive at a module and how they leave it.

Torch's PrepareModuleInput wants the positional and the keyword arguments of each call spelled out; ours binds
names by the signature of forward, so that both ways of calling match one rule.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.declared import equal_gradient
from parallelizer.placement import to_torch
from parallelizer.plan import PARTIAL, REPLICATE, Flow, Placement
from parallelizer.styles.attributes import nearest_number, numbers
from parallelizer.styles.base import Sharding, StyleError, Target, implements, named_inputs
from parallelizer.suggest import did_you_mean

if TYPE_CHECKING:
    from parallelizer.context.sequence import CurrentOrder


@dataclass(frozen=True)
class Layouts:
    """Flows with every placement resolved, and whether plain tensors are handed on.

    `partial_gradients`: where a plain input stands for a replicated one, its gradients are parts to be summed
    over the axis. `partial_output_gradients` says the same of outputs; `last` of their last features alone, so many.
    """

    input: Mapping[str, Flow] = field(default_factory=dict)
    output: Mapping[str, Flow] = field(default_factory=dict)
    local_input: bool = False
    local_output: bool = True
    partial_gradients: bool = False
    partial_output_gradients: bool = False
    last: int | None = None


class PrepareIO(ParallelStyle):
    """Inputs and outputs of one module laid out anew on one axis, by torch's DTensor redistribution."""

    def __init__(self, layouts: Layouts, axis: str) -> None:
        super().__init__()
        self.layouts, self.axis = layouts, axis

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hook_layouts(module, device_mesh, self.layouts, self.axis)
        return module


class SplitSequence(ParallelStyle):
    """Inputs and outputs split or gathered over the context-parallel axis, in the order of the model's `sequence`."""

    def __init__(self, layouts: Layouts, sequence: CurrentOrder | None = None) -> None:
        super().__init__()
        self.layouts, self.sequence = layouts, sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from parallelizer.context.order import Order
        from parallelizer.context.sequence import CurrentOrder, relay

        group = device_mesh.get_group()
        sequence = self.sequence or CurrentOrder(Order(device_mesh.size()))
        _hook_inputs(module, self.layouts.input, lambda x, flow: relay(x, flow, group, sequence))
        _hook_outputs(module, self.layouts.output, lambda x, flow: relay(x, flow, group, sequence))
        return module


def hook_layouts(module: nn.Module, mesh: DeviceMesh, layouts: Layouts, axis: str) -> None:
    """Register the hooks that turn arriving tensors into DTensors as wanted, and outputs back."""
    names = mesh.mesh_dim_names or (axis,)
    index = names.index(axis)

    def place(placement: Placement) -> list[Any]:
        placements: list[Any] = [Replicate()] * mesh.ndim
        placements[index] = to_torch(placement)
        return placements

    def laid_out(tensor: torch.Tensor, flow: Flow) -> DTensor:
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, place(flow.arrives or REPLICATE), run_check=False)
        return tensor if flow.wanted is None else tensor.redistribute(placements=place(flow.wanted))

    def convert_input(tensor: torch.Tensor, flow: Flow) -> torch.Tensor:
        if makes_partial(flow):
            # Not by redistribution, whose gradient is that of the whole: this rank's term has a term of it.
            return tensor / mesh.size(index)
        wanted = laid_out(tensor, flow)
        if not layouts.local_input:
            return wanted
        _check_even(wanted, index, axis, module)
        gradient = list(wanted.placements)
        if layouts.partial_gradients and gradient[index].is_replicate():
            gradient[index] = Partial()
        return wanted.to_local(grad_placements=gradient)

    def convert_output(tensor: torch.Tensor, flow: Flow) -> torch.Tensor:
        wanted = laid_out(tensor, flow)
        if not layouts.local_output:
            return wanted
        _check_even(wanted, index, axis, module)
        local = wanted.to_local()
        return summed_in_backward(local) if layouts.partial_output_gradients else local

    def summed_in_backward(local: torch.Tensor) -> torch.Tensor:
        before = 0 if layouts.last is None else local.size(-1) - layouts.last
        others, own = local.split([before, local.size(-1) - before], dim=-1)
        gradient = place(PARTIAL)
        own = DTensor.from_local(own, mesh, place(REPLICATE), run_check=False).to_local(
            grad_placements=gradient
        )
        return torch.cat([equal_gradient(others, axis), own], dim=-1) if before else own

    _hook_inputs(module, layouts.input, convert_input)
    _hook_outputs(module, layouts.output, convert_output)


def _check_even(tensor: DTensor, index: int, axis: str, module: nn.Module) -> None:
    """Parts that are handed on as plain tensors must be equal: nobody could tell later how long the whole was, and ranks
    would send each other tensors of unequal sizes. Raises RuntimeError.
    """
    placement = tensor.placements[index]
    if not placement.is_shard():
        return
    dim, ranks = placement.dim % tensor.ndim, tensor.device_mesh.size(index)  # type: ignore[attr-defined]
    if tensor.size(dim) % ranks:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} at {type(module).__name__} cannot be split along dimension {dim} into "
            f"equal parts over {axis}={ranks}: let it be whole there, as `replicate`"
        )


Convert = Callable[[torch.Tensor, Flow], torch.Tensor]


def _hook_inputs(module: nn.Module, flows: Mapping[str, Flow], convert: Convert) -> None:
    """Convert named inputs before anything that was hooked earlier sees them: styles are applied from the
    inside out.
    """
    signature = inspect.signature(module.forward)
    kinds = {p.kind: p.name for p in signature.parameters.values()}
    others, keywords = kinds.get(inspect.Parameter.VAR_POSITIONAL), kinds.get(inspect.Parameter.VAR_KEYWORD)

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        for name in flows:
            if name == "" and others and given.get(others):  # forward takes *args: the first of them
                first, *rest = given[others]
                given[others] = (_converted(first, name), *rest)
            elif name in signature.parameters:
                if name in given:
                    given[name] = _converted(given[name], name)
            elif keywords and name in given.get(keywords, {}):
                given[keywords] = {**given[keywords], name: _converted(given[keywords][name], name)}
            else:
                raise RuntimeError(
                    f"a call of {type(module).__name__} has no input {name!r} that a plan's `input` names"
                )
        return bound.args, bound.kwargs

    def _converted(value: Any, name: str) -> Any:
        if value is None:  # an optional input
            return None
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(
                f"the input {name!r} of {type(module).__name__} is no tensor but a {type(value).__name__}, which a "
                "plan's `input` cannot lay out"
            )
        return convert(value, flows[name])

    if flows:
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def _hook_outputs(module: nn.Module, flows: Mapping[str, Flow], convert: Convert) -> None:
    """Convert outputs after everything that was hooked earlier."""

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for key, flow in flows.items():
            output = _replaced(output, key, flow, convert, module)
        return output

    if flows:
        module.register_forward_hook(after)


def _replaced(output: Any, key: str, flow: Flow, convert: Convert, module: nn.Module) -> Any:
    """The output with one tensor in it converted; the container is copied, never changed in place."""
    if isinstance(output, torch.Tensor) and key in ("", "0"):
        return convert(output, flow)
    if isinstance(output, tuple | list) and (key == "" or key.isdigit()):
        index = int(key or 0)
        if index < len(output) and isinstance(output[index], torch.Tensor):
            items = [convert(x, flow) if i == index else x for i, x in enumerate(output)]
            return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, dict):
        name = key if key else next(iter(output), "")
        if isinstance(output.get(name), torch.Tensor):
            changed = copy.copy(output)
            changed[name] = convert(output[name], flow)
            return changed
    raise RuntimeError(
        f"the output of {type(module).__name__} ({type(output).__name__}) has no tensor {key or 'first'!r}, which a "
        "plan's `output` names"
    )


def makes_partial(flow: Flow) -> bool:
    """Whether each rank is to take an equal term of what arrives whole, `replicate -> partial`."""
    arrives, wanted = flow.arrives or REPLICATE, flow.wanted
    return wanted is not None and wanted.kind == "partial" and arrives.kind == "replicate"


def check_flows(target: Target, flows: Mapping[str, Flow], option: str, terms: bool = False) -> None:
    """Refuse what a redistribution cannot do: making something partial out of what is not, but for `terms`, which are
    plain tensors. Raises StyleError.
    """
    for flow in flows.values():
        if terms and makes_partial(flow):
            continue
        if (
            flow.wanted is not None
            and flow.wanted.kind == "partial"
            and (flow.arrives is None or flow.arrives.kind != "partial")
        ):
            raise StyleError(
                "unknown-placement",
                f"`{flow}` wants a partial tensor",
                "partial is a way to arrive, not to leave",
                option,
                flow.wanted.span,
            )


def _prepare(target: Target, inputs: bool, outputs: bool) -> Sharding:
    options = target.options
    local = options.get("local")
    partial = options.get("grad") == "partial"
    layouts = Layouts(
        input=named_inputs(target) if inputs else {},
        output=options.get("output") or {} if outputs else {},
        local_input=bool(options.get("local_input", local if not outputs else False)),
        local_output=True if local is None else local,
        partial_gradients=partial and inputs,
        partial_output_gradients=partial and not inputs,
        last=_last(target),
    )
    missing = [o for o, on in (("input", inputs), ("output", outputs)) if on and not getattr(layouts, o)]
    if len(missing) == inputs + outputs:
        raise StyleError(
            "missing-option",
            f"the rule does not say which {' or '.join(missing)}",
            f"write {missing[0]}: {{x: shard(1) -> replicate}}",
        )
    check_flows(target, layouts.input, "input", terms=layouts.local_input)
    check_flows(target, layouts.output, "output")
    if layouts.partial_output_gradients:
        _check_summed(layouts)
    if target.axis == "cp":
        _check_split(layouts.input, "input")
        _check_split(layouts.output, "output")
        return Sharding(SplitSequence(layouts), ("cp",))
    return Sharding(PrepareIO(layouts, target.axis), (target.axis,), arrives=arrivals(layouts.input))


def _last(target: Target) -> int | None:
    """How many of the last features `grad` is of; None for all. Raises StyleError."""
    written = target.options.get("grad_last")
    if not isinstance(written, str):
        return written
    modules = (target.module, *target.around)
    value = nearest_number(modules, written)
    if value is None or value < 1:
        known = list(dict.fromkeys(n for m in modules[:2] for n in numbers(m)))
        raise StyleError(
            "unknown-attribute",
            f"neither {target.path} nor a module around it has a positive whole number {written!r}",
            did_you_mean(written, known, "there are"),
            "grad_last",
        )
    return value


def _check_summed(layouts: Layouts) -> None:
    """`grad: partial` is of an output that every rank holds whole and hands on as a plain tensor. Raises StyleError."""
    for flow in layouts.output.values():
        if flow.wanted is None or flow.wanted.kind != "replicate" or not layouts.local_output:
            raise StyleError(
                "wrong-layout",
                f"`grad: partial` is of an output that is handed on whole, as a plain tensor, and not of `{flow}`",
                "write `output: replicate`, without `local: false`; or leave `grad` out",
                "grad",
            )


def arrivals(flows: Mapping[str, Flow]) -> dict[str, Placement]:
    """How the inputs that are laid out anew are taken to arrive."""
    return {name: flow.arrives or REPLICATE for name, flow in flows.items()}


def _check_split(flows: Mapping[str, Flow], option: str) -> None:
    """Over cp a plain tensor is split or gathered, and nothing in it tells how it lies. Raises StyleError."""
    for flow in flows.values():
        kinds = {p.kind for p in (flow.arrives, flow.wanted) if p is not None}
        if kinds != {"replicate", "shard"}:
            raise StyleError(
                "wrong-layout",
                f"`{flow}` does not say how to split or gather the sequence over cp",
                "write shard(1) -> replicate, or replicate -> shard(1)",
                option,
                next((p.span for p in (flow.arrives, flow.wanted) if p is not None), None),
            )


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
    """Both; `local` is for the outputs, `local_input` for the inputs, as in torch's
    PrepareModuleInputOutput.
    """
    return _prepare(target, True, True)
