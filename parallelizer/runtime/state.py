"""The state that a parallel model stores about its parallelization."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelizer import torch_private
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import full_name

if TYPE_CHECKING:
    from parallelizer.runtime.pipeline.live import LivePipeline
    from parallelizer.styles.application import Program
    from parallelizer.styles.context_parallel.buffers import LocalBuffers
    from parallelizer.styles.packing import Packing

_ATTRIBUTE = "_parallelizer_state"
_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@dataclass(frozen=True)
class ParallelState:
    """The program that was applied, the mesh it runs on, packed parameters by name, the model's local
    buffers, the groups of ranks that see different tokens, the names that parameters had, the stages of this rank
    if the model is cut, and the parameters that others stand for now, by `id`, with their names.
    """

    program: Program
    mesh: DeviceMesh
    packed: Mapping[str, Packing]
    buffers: LocalBuffers
    data_groups: tuple[dist.ProcessGroup, ...]
    parameters: frozenset[str] | None = None
    pipeline: LivePipeline | None = None
    replaced: Mapping[int, tuple[weakref.ref[torch.Tensor], str]] = field(default_factory=dict)

    @property
    def sum_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which sums of losses become those of the whole batch: of the ranks of a pipeline one has any."""
        return self.data_groups if self.pipeline is None else (*self.data_groups, self.pipeline.group)


def remember(model: nn.Module, state: ParallelState) -> None:
    """Attach the state to the model, outside its parameters, buffers and modules."""
    model.__dict__[_ATTRIBUTE] = state


def state_of(model: nn.Module) -> ParallelState | None:
    """The state of a parallel model, or None for any other."""
    return model.__dict__.get(_ATTRIBUTE)


def refuse_added_parameters(model: nn.Module) -> None:
    """Raise PlanError for parameters that a parallel model is to train and did not have when it was made parallel.

    A DTensor is taken to be one that it had, under another name.
    """
    state = state_of(model)
    if state is None or state.parameters is None or state.program.mesh.world_size == 1:
        return
    added = [
        name
        for name, param in model.named_parameters()
        if name not in state.parameters and param.requires_grad and not isinstance(param, DTensor)
    ]
    if added:
        shown = ", ".join(fold_paths(added)[:3])
        message = f"{shown} were added after the model was made parallel on {state.program.mesh}, so no rule sums their gradients"
        raise PlanError(
            [
                Diagnostic(
                    "parameters-added",
                    message,
                    None,
                    "add adapters before you apply the plan, and write globs that match the wrapped modules",
                )
            ]
        )


def refuse_replaced_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that holds parameters of before the model was made parallel: it would train none of the
    model's. An optimizer is looked at once.
    """
    state = state_of(model)
    if state is None or not state.replaced or optimizer in _looked_at:
        return
    stale = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            was, name = state.replaced.get(id(param), (None, ""))
            if was is not None and was() is param:
                stale.append(name)
    if stale:
        raise ValueError(
            f"the optimizer holds {', '.join(fold_paths(stale)[:3])} as they were before the model was made parallel, so its "
            "steps would not change the model. Build the optimizer after parallelizer.parallelize"
        )
    _looked_at.add(optimizer)


def uncut(model: nn.Module) -> nn.Module:
    """The model with all its modules: of one that is cut into stages a copy of it on meta, as it was; else itself."""
    state = state_of(model)
    return model if state is None or state.pipeline is None else state.pipeline.whole


def reshard(model: nn.Module) -> None:
    """Free what FSDP's units have gathered: an evaluation leaves some of them whole, cast to the dtype that they compute in."""
    state = state_of(model)
    stages = () if state is None or state.pipeline is None else state.pipeline.models.values()
    for root in stages or (model,):  # a stage's outermost unit lies around the model
        for unit in torch_private.fsdp_modules(root):
            unit.reshard()


def restore_buffers(model: nn.Module) -> None:
    """Restore a parallel model's whole buffers to their values before its last forward."""
    state = state_of(model)
    if state is not None:
        state.buffers.restore()


def every_group(model: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which one reduction after another is a reduction over all ranks of the model: one where the
    model has the whole world, else one an axis; none for a model of one rank.
    """
    state = state_of(model)
    if state is None or state.mesh.size() == 1:
        return ()
    world = dist.group.WORLD
    if world is not None and state.mesh.size() == dist.get_world_size():
        return (world,)
    return tuple(g for g in state.mesh.get_all_groups() if g.size() > 1)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict has, by name."""
    return {
        full_name(path, name): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if torch_private.is_persistent(module, name)
    }


def kept_buffers(model: nn.Module) -> Callable[[torch.Tensor | None], None]:
    """Copy the persistent buffers, running statistics for instance. Returns a function that gives them these values
    again, and puts the whole ones of context parallelism back. Where the function is given a scalar tensor, buffers get these
    values if it is not 0, which the device alone decides.
    """
    copies = [(buffer, buffer.detach().clone()) for buffer in persistent_buffers(model).values()]

    def put_back(condition: torch.Tensor | None = None) -> None:
        restore_buffers(model)
        with torch.no_grad():
            for buffer, value in copies:
                there, value = _own_part(buffer), _own_part(value)
                if condition is not None:
                    value = torch.where(condition.to(there.device) != 0, value, there)
                there.copy_(value)

    return put_back


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes: its mesh's kind of device, or where its first parameter lies."""
    state = state_of(model)
    if state is not None and state.mesh.device_type != "cpu":
        module = torch.get_device_module(state.mesh.device_type)
        return torch.device(state.mesh.device_type, module.current_device())
    first = next((p for p in model.parameters()), None)
    return torch.device("cpu") if state is not None or first is None else first.device
