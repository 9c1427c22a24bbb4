"""A model as it was before it was cut: its modules, names, shapes and ties, on meta, where it takes no memory."""

from __future__ import annotations

import torch
from torch import nn

from parallelizer.torch_private import twin


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model on meta. No constructor runs. What is one module, parameter or buffer at several places stays one."""
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}

    def parameter(param: nn.Parameter) -> nn.Parameter:
        made = tensors.get(id(param))
        if not isinstance(made, nn.Parameter):
            made = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            tensors[id(param)] = made
        return made

    def buffer(tensor: torch.Tensor) -> torch.Tensor:
        return tensors.setdefault(id(tensor), torch.empty_like(tensor, device="meta"))

    def module(one: nn.Module) -> nn.Module:
        if one not in modules:
            modules[one] = twin(one, type(one), parameter=parameter, buffer=buffer, child=module)
        return modules[one]

    return module(model)
