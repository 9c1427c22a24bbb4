"""Placements of tensors at the inputs and outputs of a module, converted by torch's DTensor redistribution.

Torch's PrepareModuleInput needs a list of the positional and the keyword arguments of each call. This one
binds names by the signature of forward, so that both ways of calling match one rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.language import plan
from parallelizer.language.placement import to_torch
from parallelizer.language.plan import Flow
from parallelizer.styles.application import Application
from parallelizer.styles.equal_gradient import equal_gradient
from parallelizer.styles.float8.inputs import gather_input_in_float8
from parallelizer.styles.statements import Statement, calls, dict_text, placements_text
from parallelizer.styles.tensor_hooks import convert_inputs, convert_outputs

Placements = Sequence[Placement]
Layout = tuple[Placements, Placements | None]
"""How a tensor arrives, and how it is wanted (None: as it arrives), in placements for every dimension of a mesh."""


def lay_out(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    inputs: Mapping[str, Layout] | None = None,
    outputs: Mapping[str, Layout] | None = None,
    local_inputs: bool = False,
    local_outputs: bool = True,
    partial_gradients: bool = False,
    partial_output_gradients: bool = False,
    partial_last: int | None = None,
    others: Callable[[torch.Tensor], torch.Tensor] | None = None,
    gather: Callable[[nn.Module, DTensor, Placements], DTensor] | None = None,
) -> None:
    """Turn inputs, by the name of forward's parameter, and outputs, by index or key, into DTensors as wanted.

    `local_inputs` and `local_outputs` hand plain tensors on. `partial_gradients`: where a plain input stands for a replicated
    one, its gradients are parts to be summed. `partial_output_gradients` says so of outputs, `partial_last` of so many of
    their last features alone; `others` is then put around the features before those. `gather` brings an input of the module to
    its wanted placements in another way than DTensor's.
    """

    def laid_out(tensor: torch.Tensor, layout: Layout) -> DTensor:
        arrives, wanted = layout
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, arrives, run_check=False)
        return tensor if wanted is None else tensor.redistribute(placements=wanted)

    def convert_input(tensor: torch.Tensor, name: str) -> torch.Tensor:
        layout = (inputs or {})[name]
        terms = number_of_terms(layout)
        if terms > 1:
            # Not by redistribution, whose gradient is that of the whole: this rank's term has a term of it.
            return tensor / terms
        arrives, after = layout
        if gather is not None and after is not None:
            return gather(module, laid_out(tensor, (arrives, None)), after)
        wanted = laid_out(tensor, layout)
        if not local_inputs:
            return wanted
        check_even(wanted)
        gradient = [Partial() if partial_gradients and p.is_replicate() else p for p in wanted.placements]
        return wanted.to_local(grad_placements=gradient)

    def convert_output(tensor: torch.Tensor, key: str) -> torch.Tensor:
        wanted = laid_out(tensor, (outputs or {})[key])
        if not local_outputs:
            return wanted
        check_even(wanted)
        local = wanted.to_local()
        return summed_in_backward(local) if partial_output_gradients else local

    def number_of_terms(layout: Layout) -> int:
        """The ranks that each take an equal term of what arrives whole and is wanted partial."""
        arrives, wanted = layout
        terms = 1
        for dim, (before, after) in enumerate(zip(arrives, wanted or arrives, strict=True)):
            terms *= mesh.size(dim) if before.is_replicate() and after.is_partial() else 1
        return terms

    def summed_in_backward(local: torch.Tensor) -> torch.Tensor:
        before = 0 if partial_last is None else local.size(-1) - partial_last
        first, last = local.split([before, local.size(-1) - before], dim=-1)
        gradient = [Partial()] * mesh.ndim
        last = DTensor.from_local(last, mesh, run_check=False).to_local(grad_placements=gradient)
        if not before:
            return last
        return torch.cat([others(first) if others is not None else first, last], dim=-1)

    def check_even(tensor: DTensor) -> None:
        """Parts that are returned as plain tensors must be equal: the length of the whole would not be known later, and ranks
        would send each other tensors of unequal sizes.
        """
        for dim, placement in enumerate(tensor.placements):
            if not placement.is_shard():
                continue
            at, ranks = placement.dim % tensor.ndim, tensor.device_mesh.size(dim)  # type: ignore[attr-defined]
            axis = (tensor.device_mesh.mesh_dim_names or ("the mesh",) * (dim + 1))[dim]
            if tensor.size(at) % ranks:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} at {type(module).__name__} cannot be split along dimension {at} "
                    f"into equal parts over {axis}={ranks}: write `replicate` there"
                )

    convert_inputs(module, inputs or {}, convert_input)
    convert_outputs(module, outputs or {}, convert_output)


@dataclass(frozen=True)
class Layouts:
    """Flows with every placement resolved, and whether plain tensors are handed on.

    `partial_gradients`: where a plain input stands for a replicated one, its gradients are parts to be summed
    over the axis. `partial_output_gradients` says the same of outputs; `last` of their last features alone, so many.
    `float8`: inputs travel in float8.
    """

    input: Mapping[str, Flow] = field(default_factory=dict)
    output: Mapping[str, Flow] = field(default_factory=dict)
    local_input: bool = False
    local_output: bool = True
    partial_gradients: bool = False
    partial_output_gradients: bool = False
    last: int | None = None
    float8: bool = False

    def on(self, axes: Sequence[str], axis: str) -> dict[str, Any]:
        """The keyword arguments of `lay_out` on a mesh of these axes, of which the flows are about one."""

        def place(placement: plan.Placement | None) -> list[Placement] | None:
            if placement is None:
                return None
            return [to_torch(placement) if a == axis else Replicate() for a in axes]

        def flows(named: Mapping[str, Flow]) -> dict[str, Layout]:
            return {n: (place(f.arrives or plan.REPLICATE) or [], place(f.wanted)) for n, f in named.items()}

        return {
            "inputs": flows(self.input),
            "outputs": flows(self.output),
            "local_inputs": self.local_input,
            "local_outputs": self.local_output,
            "partial_gradients": self.partial_gradients,
            "partial_output_gradients": self.partial_output_gradients,
            "partial_last": self.last,
            "others": lambda tensor: equal_gradient(tensor, axis),
            "gather": gather_input_in_float8 if self.float8 else None,
        }


class PrepareIO(ParallelStyle):
    """Inputs and outputs of one module laid out anew on one axis."""

    def __init__(self, layouts: Layouts, axis: str) -> None:
        super().__init__()
        self.layouts, self.axis = layouts, axis

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        lay_out(module, device_mesh, **self.layouts.on(device_mesh.mesh_dim_names or (self.axis,), self.axis))
        return module


def without_cast(application: Application) -> Application:
    """The same with inputs that travel in their own dtype, for a model whose linears are not in float8."""
    act = application.act
    if not isinstance(act, PrepareIO) or not act.layouts.float8:
        return application
    act = PrepareIO(dataclasses.replace(act.layouts, float8=False), act.axis)
    return dataclasses.replace(application, act=act)


def lay_out_statement(layouts: Layouts, axes: Sequence[str], axis: str, mesh: str) -> Statement:
    """The call of `lay_out` on a mesh of these axes that the variable `mesh` holds."""
    given = layouts.on(axes, axis)
    arguments = [mesh]
    for side in ("inputs", "outputs"):
        if given[side]:
            texts = {
                name: f"({placements_text(arrives)}, {'None' if wanted is None else placements_text(wanted)})"
                for name, (arrives, wanted) in given[side].items()
            }
            arguments.append(f"{side}={dict_text(texts)}")
    if layouts.local_input:
        arguments.append("local_inputs=True")
    if not layouts.local_output:
        arguments.append("local_outputs=False")
    if layouts.partial_gradients:
        arguments.append("partial_gradients=True")
    if layouts.partial_output_gradients:
        arguments.append("partial_output_gradients=True")
    if layouts.last is not None:
        arguments.append(f"partial_last={layouts.last}")
    call = calls(lay_out, *arguments)
    if not layouts.float8:
        return call
    given_too = (*(call.arguments or ()), f"gather={gather_input_in_float8.__name__}")
    return dataclasses.replace(call, arguments=given_too, copies=(lay_out, gather_input_in_float8))


def makes_partial(flow: Flow) -> bool:
    """Whether each rank is to take an equal term of what arrives whole, `replicate -> partial`."""
    arrives, wanted = flow.arrives or plan.REPLICATE, flow.wanted
    return wanted is not None and wanted.kind == "partial" and arrives.kind == "replicate"


def arrivals(flows: Mapping[str, Flow]) -> dict[str, plan.Placement]:
    """How the inputs that are laid out anew are taken to arrive."""
    return {name: flow.arrives or plan.REPLICATE for name, flow in flows.items()}
