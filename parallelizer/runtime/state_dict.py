"""The tensors of a model's state dict: as this rank holds them, and whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.language.plan import full_name
from parallelizer.runtime.held_indices import original_shape
from parallelizer.runtime.initialize import fill
from parallelizer.runtime.state import restore_buffers, state_of
from parallelizer.styles.packing import Packing
from parallelizer.styles.tied_parameters import parameter_names
from parallelizer.torch_private import is_persistent


@dataclass(frozen=True)
class StateTensor:
    """A tensor as it lies on this rank, and how its parts are packed where they are."""

    tensor: torch.Tensor
    packing: Packing | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it has in the unsharded model."""
        return original_shape(self.tensor, self.packing)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its numbers."""
        return self.tensor.dtype


def state_tensors(model: nn.Module) -> dict[str, StateTensor]:
    """Parameters under all their names, and the buffers that are saved: what a state dict has, as it lies."""
    state = state_of(model)
    packed = state.packed if state else {}
    tensors: dict[str, torch.Tensor] = {**parameter_names(model)}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, name):
                tensors[full_name(path, name)] = buffer
    return {name: StateTensor(tensor, packed.get(name)) for name, tensor in tensors.items()}


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole copies of all parameters and persistent buffers on the CPU, in the model's original layout.

    Collective: every rank calls it and gets all of them.
    """
    restore_buffers(model)
    return {
        name: whole_tensor(tensor, model, name).cpu()
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def load_whole_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Fill a parallel model, whose memory is allocated, from the state dict of the model without a plan. No
    communication.

    Raises ValueError, with the model unchanged, if names or shapes differ from the model's.
    """
    restore_buffers(model)
    own = model.state_dict(keep_vars=True)
    wrong = [f"{name} is missing" for name in own if name not in state]
    wrong += [f"the model has no {name}" for name in state if name not in own]
    wrong += [
        f"{name} is {list(state[name].shape)}, in the model {list(tensor.shape)}"
        for name, tensor in own.items()
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
