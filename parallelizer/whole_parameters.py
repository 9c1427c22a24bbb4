"""Parameters that FSDP leaves whole (too small, or nothing divides): every data rank holds them, so their gradients are summed.

The sum is a hook on the parameter itself, wherever it is used. Materialising replaces parameters, so that the hooks are looked
after whenever the model's forward begins.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

Groups = Sequence[dist.ProcessGroup]


def sum_gradients_of(model: nn.Module, groups: Mapping[str, Groups]) -> None:
    """From the next forward of `model` on, sum the gradients of the named parameters over their groups in backward."""
    hooked: dict[str, nn.Parameter] = {}

    def attach(*_: Any) -> None:
        for name, own in groups.items():
            param = model.get_parameter(name)
            if hooked.get(name) is not param and param.requires_grad:
                param.register_hook(functools.partial(_sum_over, own))
                hooked[name] = param

    if groups:
        model.register_forward_pre_hook(attach)


def _sum_over(groups: Groups, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone()
    local = total.to_local() if isinstance(total, DTensor) else total
    for group in groups:
        dist.all_reduce(local, group=group)
    return total
