"""The state dict of a parallel model as the unparallel one has it: whole tensors, under its names, in its layout.

`model.state_dict()` has DTensors, and of a packed parameter (`q|k|v` in one weight) the ranks' slices behind each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.initialize import fill
from parallelizer.state import restore_buffers, state_of


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and persistent buffers, whole, on the CPU, in the model's original layout.

    Collective: every rank calls it, and gets everything.
    """
    restore_buffers(model)
    return {
        name: whole_tensor(tensor, model, name).cpu()
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def load_whole_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Fill a parallel model, whose memory is allocated, from the state dict of the unparallel one. No communication.

    Raises ValueError, with the model untouched, when names or shapes are not the model's.
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
