"""The tensors of a model's state dict: as this rank holds them, and whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.runtime.fail_together import gathered
from parallelizer.runtime.held_indices import original_shape
from parallelizer.runtime.initialize import fill
from parallelizer.runtime.pipeline.live import LivePipeline
from parallelizer.runtime.state import device_of, persistent_buffers, restore_buffers, state_of, uncut
from parallelizer.styles.packing import Packing
from parallelizer.styles.tied_parameters import parameter_names


@dataclass(frozen=True)
class StateTensor:
    """A tensor as it lies on this rank, and how its parts are packed where they are.

    `first` is its first name in the model, or in the whole model if this one is cut into stages. `holders` are then the ranks
    on `pp` that hold the tensor; none for a copy of a parameter that another stage owns.
    """

    tensor: torch.Tensor
    packing: Packing | None
    first: str
    holders: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it has in the unsharded model."""
        return original_shape(self.tensor, self.packing)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its numbers."""
        return self.tensor.dtype


def state_tensors(model: nn.Module) -> dict[str, StateTensor]:
    """Parameters under all their names, and the buffers that are saved: what a state dict has, as it lies. Of a model that is
    cut into stages those of this rank.
    """
    state = state_of(model)
    packed, pipeline = (state.packed, state.pipeline) if state else ({}, None)
    tensors: dict[str, torch.Tensor] = {**parameter_names(model), **persistent_buffers(model)}
    if pipeline is None:
        firsts: dict[int, str] = {}
        return {n: StateTensor(t, packed.get(n), firsts.setdefault(id(t), n)) for n, t in tensors.items()}
    first = {name: one.first for name, one in state_tensors(pipeline.whole).items()}
    copies = {one.here for one in pipeline.copies}
    return {
        name: StateTensor(
            tensor,
            packed.get(name),
            first[name],
            () if name in copies else pipeline.holders(name, buffer=not isinstance(tensor, nn.Parameter)),
        )
        for name, tensor in tensors.items()
    }


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole copies of all parameters and persistent buffers on the CPU, in the model's original layout.

    Collective: every rank calls it and gets all of them, also of a model that is cut into stages.
    """
    restore_buffers(model)
    state = state_of(model)
    own = model.state_dict(keep_vars=True)
    if state is None or state.pipeline is None:
        return {name: whole_tensor(tensor, model, name).cpu() for name, tensor in own.items()}
    return _of_all_stages(model, own, state.pipeline)


def _of_all_stages(
    model: nn.Module, own: Mapping[str, torch.Tensor], pipeline: LivePipeline
) -> dict[str, torch.Tensor]:
    """The whole tensors of all stages. Each is sent by the rank of a stage that owns it."""
    found: dict[str, torch.Tensor] = {}
    dtypes: list[dict[str, torch.dtype]] = gathered({n: t.dtype for n, t in own.items()}, pipeline.group)
    firsts: dict[int, str] = {}
    for name, whole in uncut(model).state_dict(keep_vars=True).items():
        first = firsts.setdefault(id(whole), name)
        if first != name:
            found[name] = found[first].clone()
            continue
        holder = pipeline.holders(name, buffer=not isinstance(whole, nn.Parameter))[0]
        if holder == pipeline.rank:
            tensor = whole_tensor(own[name], model, name).to(device_of(model)).contiguous()
        else:
            tensor = torch.empty(whole.shape, dtype=dtypes[holder][name], device=device_of(model))
        dist.broadcast(tensor, src=pipeline.world[holder], group=pipeline.group)
        found[name] = tensor.cpu()
    return found


def load_whole_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Fill a parallel model, whose memory is allocated, from the state dict of the model without a plan. No
    communication. Of a model that is cut into stages every rank takes its part.

    Raises ValueError, with the model unchanged, if names or shapes differ from the model's.
    """
    restore_buffers(model)
    own, every = model.state_dict(keep_vars=True), uncut(model).state_dict(keep_vars=True)
    wrong = [f"{name} is missing" for name in every if name not in state]
    wrong += [f"the model has no {name}" for name in state if name not in every]
    wrong += [
        f"{name} is {list(state[name].shape)}, in the model {list(tensor.shape)}"
        for name, tensor in every.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the state does not fit the model: {'; '.join(wrong[:3])}{more}")
    remembered = state_of(model)
    packed = remembered.packed if remembered else {}
    with torch.no_grad():
        for name, tensor in own.items():
            fill(tensor, state[name], packed.get(name))


def whole_tensor(tensor: torch.Tensor, model: nn.Module, name: str) -> torch.Tensor:
    """A copy of a parameter of the model, or of something of its shape, whole and in its original order. Collective for a
    DTensor.
    """
    full = tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
    state = state_of(model)
    packing = state.packed.get(name) if state else None
    return (packing.unpack(full) if packing else full).clone()
