"""The tensors of a model that a state dict has, as they lie on this rank, and what they are whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from parallelizer.plan import full_name
from parallelizer.shares import original_shape
from parallelizer.state import state_of
from parallelizer.styles.packing import Packing
from parallelizer.tied_parameters import parameter_names


def original_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The state dict's names, and the shapes that they have in the unsharded model."""
    packed = packings(model)
    return {name: original_shape(tensor, packed.get(name)) for name, tensor in state_tensors(model).items()}


def packings(model: nn.Module) -> Mapping[str, Packing]:
    """The packed parameters of a parallel model by name."""
    state = state_of(model)
    return state.packed if state else {}


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters under all their names, and the buffers that are saved: what a state dict has, as it lies."""
    buffers = {
        full_name(path, name): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return {**parameter_names(model), **buffers}
