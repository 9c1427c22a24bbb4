"""What exported code needs where torch has no class for it. The exporter copies these functions, source and
all, into its file.

So each stands on torch's public names alone, and on no other function here.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def place_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]]
) -> None:
    """Make the module's own parameters DTensors, placed as said for each dimension of the mesh."""
    for name, placement in placements.items():
        param = getattr(module, name)
        placed = distribute_tensor(param.detach(), mesh, placement)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=param.requires_grad))


def run_on_local_parameters(module: nn.Module, gradients: Mapping[str, Sequence[Placement]]) -> None:
    """Let forward see the local shards of DTensor parameters; `gradients` says how the gradients of those
    lie."""
    forward = module.forward

    @functools.wraps(forward)
    def on_local_parameters(*args: Any, **kwargs: Any) -> Any:
        try:
            for name, placements in gradients.items():
                # An instance attribute is found before a registered parameter, and leaves it untouched.
                module.__dict__[name] = getattr(module, name).to_local(grad_placements=placements)
            return forward(*args, **kwargs)
        finally:
            for name in gradients:
                module.__dict__.pop(name, None)

    module.forward = on_local_parameters


def slice_buffers(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]], *, local: bool = True
) -> None:
    """Let forward see this rank's slices of buffers, which stay whole; as DTensors if not `local`."""
    forward = module.forward

    @functools.wraps(forward)
    def on_slices(*args: Any, **kwargs: Any) -> Any:
        try:
            for name, placement in placements.items():
                whole = DTensor.from_local(getattr(module, name), mesh, run_check=False)
                part = whole.redistribute(placements=placement)
                module.__dict__[name] = part.to_local() if local else part
            return forward(*args, **kwargs)
        finally:
            for name in placements:
                module.__dict__.pop(name, None)

    module.forward = on_slices


def run_on_head(module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int], *, heads: int) -> None:
    """Let forward see the features of one of `heads` heads: neighbouring ranks share one, and add its gradients up."""
    forward, head = module.forward, mesh.get_local_rank() * heads // mesh.size()

    @functools.wraps(forward)
    def on_head(*args: Any, **kwargs: Any) -> Any:
        try:
            for name, dim in dims.items():
                whole = getattr(module, name).to_local(grad_placements=[Partial()])
                size = whole.shape[dim] // heads
                module.__dict__[name] = whole.narrow(dim, head * size, size)
            return forward(*args, **kwargs)
        finally:
            for name in dims:
                module.__dict__.pop(name, None)

    module.forward = on_head


def pack(module: nn.Module, name: str, dim: int, parts: Sequence[int], ranks: int) -> None:
    """Reorder a fused dimension, made of `parts`, so that an even shard of it holds every rank's share of
    each part."""
    param = getattr(module, name)
    pieces = [part.chunk(ranks, dim) for part in param.detach().split(list(parts), dim)]
    packed = torch.cat([piece[rank] for rank in range(ranks) for piece in pieces], dim)
    module.register_parameter(name, nn.Parameter(packed, requires_grad=param.requires_grad))


def divide_own(module: nn.Module, name: str, ranks: int) -> None:
    """Divide a number in an object that the module holds, `config.heads`, in a copy that only the module has."""

    def put(holder: Any, attribute: str, value: Any) -> None:
        try:
            setattr(holder, attribute, value)
        except AttributeError:  # a frozen dataclass
            object.__setattr__(holder, attribute, value)

    *path, leaf = name.split(".")
    holder: Any = module
    for part in path:
        put(holder, part, copy.copy(getattr(holder, part)))
        holder = getattr(holder, part)
    put(holder, leaf, getattr(holder, leaf) // ranks)


def lay_out(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    inputs: Mapping[str, Sequence[Any]] | None = None,
    outputs: Mapping[str, Sequence[Any]] | None = None,
    local_inputs: bool = False,
    local_outputs: bool = True,
    partial_gradients: bool = False,
    partial_output_gradients: bool = False,
    partial_last: int | None = None,
) -> None:
    """Turn inputs, by the name of forward's parameter, and outputs, by index or key, into DTensors as wanted.

    Each is (how it arrives, how it is wanted or None), in placements for every dimension of the mesh.
    `partial_gradients`: where a local input stands for a replicated one, its gradients are parts to be
    summed; `partial_output_gradients` says so of outputs, `partial_last` of so many of their last features.
    """
    signature = inspect.signature(module.forward)

    def convert(tensor: Any, flow: Sequence[Any], local: bool, partial: bool = False) -> Any:
        arrives, wanted = flow
        if tensor is None:
            return None
        if (
            wanted is not None
            and any(map(Placement.is_partial, wanted))
            and all(map(Placement.is_replicate, arrives))
        ):
            return tensor / mesh.size()  # this rank's term of a sum
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, arrives, run_check=False)
        if wanted is not None:
            tensor = tensor.redistribute(placements=wanted)
        if not local:
            return tensor
        gradients = [Partial() if partial and p.is_replicate() else p for p in tensor.placements]
        return tensor.to_local(grad_placements=gradients)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, flow in (inputs or {}).items():
            if name in bound.arguments:
                bound.arguments[name] = convert(bound.arguments[name], flow, local_inputs, partial_gradients)
        return bound.args, bound.kwargs

    def leave(tensor: Any, flow: Sequence[Any]) -> Any:
        tensor = convert(tensor, flow, local_outputs)
        if not partial_output_gradients and partial_last is None:
            return tensor
        last = tensor.size(-1) if partial_last is None else partial_last
        others, own = tensor.split([tensor.size(-1) - last, last], dim=-1)
        own = DTensor.from_local(own, mesh, run_check=False).to_local(grad_placements=[Partial()] * mesh.ndim)
        return torch.cat([others, own], dim=-1)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        for key, flow in (outputs or {}).items():
            if isinstance(output, torch.Tensor):
                output = leave(output, flow)
            elif isinstance(output, dict):
                output, name = copy.copy(output), key or next(iter(output))
                output[name] = leave(output[name], flow)
            else:
                items = list(output)
                items[int(key or 0)] = leave(items[int(key or 0)], flow)
                output = type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
        return output

    if inputs:
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    if outputs:
        module.register_forward_hook(after)


def recompute(module: nn.Module) -> None:
    """Recompute the module's activations in backward."""
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed


def recompute_all_but(module: nn.Module, keep: Sequence[str]) -> None:
    """Recompute the module's activations in backward, but for the results of the named operators."""
    forward = module.forward

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator.name() in keep else CheckpointPolicy.PREFER_RECOMPUTE

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = recomputed


def compile_forward(module: nn.Module, **options: Any) -> None:
    """Compile the module's forward. What collectives still under way bring is waited for before: torch 2.13 loses the way
    back of a gradient to such an input.
    """
    forward, compiled = module.forward, torch.compile(module.forward, **options)

    def arrived(value: Any) -> Any:
        pending = isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter, DTensor)
        return value.clone() if pending else value

    @functools.wraps(forward)
    def forward_compiled(*args: Any, **kwargs: Any) -> Any:
        return compiled(*map(arrived, args), **{name: arrived(value) for name, value in kwargs.items()})

    module.forward = forward_compiled


def compute_in(module: nn.Module, names: Sequence[str], dtype: torch.dtype) -> None:
    """Let forward see these parameters in `dtype`, as FSDP's mixed precision does for its own."""
    forward = module.forward

    @functools.wraps(forward)
    def in_dtype(*args: Any, **kwargs: Any) -> Any:
        try:
            for name in names:
                module.__dict__[name] = getattr(module, name).to(dtype)
            return forward(*args, **kwargs)
        finally:
            for name in names:
                module.__dict__.pop(name, None)

    module.forward = in_dtype


def shard_on(module: nn.Module, dims: Mapping[str, int]) -> Any:
    """For `fully_shard`: which parameter is sharded on which dimension; the others on their first."""
    placements = {module.get_parameter(name): Shard(dim) for name, dim in dims.items()}
    return placements.get


def sum_gradients_of(unit: nn.Module, names: Sequence[str], groups: Sequence[dist.ProcessGroup]) -> None:
    """Sum the gradients of parameters that FSDP leaves whole over its groups, in float32 at least.

    Materialising a model replaces its parameters, so hooks are looked after whenever the unit's forward
    begins.
    """
    hooked: dict[str, nn.Parameter] = {}

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dtype = torch.promote_types(local.dtype, torch.float32)
        wide = local.to(dtype, memory_format=torch.contiguous_format, copy=True)
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(wide, group=group)
        total = wide.to(local.dtype)
        if not isinstance(gradient, DTensor):
            return total
        shape, stride = gradient.shape, gradient.stride()
        return DTensor.from_local(
            total, gradient.device_mesh, gradient.placements, run_check=False, shape=shape, stride=stride
        )

    def attach(*_: Any) -> None:
        for name in names:
            param = unit.get_parameter(name)
            if hooked.get(name) is not param and param.requires_grad:
                param.register_hook(summed)
                hooked[name] = param

    unit.register_forward_pre_hook(attach)


def sum_instead_of_average(model: nn.Module) -> None:
    """Have FSDP sum gradients over the data ranks, where it would average them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
