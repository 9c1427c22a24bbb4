"""A copy of a model without memory, as everything here takes it."""

from __future__ import annotations

import copy

import torch
from torch import nn


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device. Tensors that share values still do."""
    made: dict[int, object] = {}
    for parameter in model.parameters():
        made[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        made[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, made)
