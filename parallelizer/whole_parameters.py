"""Parameters that FSDP leaves whole (too small, or nothing divides): it neither sums their gradients over the
data ranks nor casts them to the dtype in which a unit computes. Both are done here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallelizer.styles.local import run_on_views

Groups = Sequence[dist.ProcessGroup]


def compute_in(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Let the modules that own the named parameters see them in `dtype`, as FSDP's mixed precision does for
    the others.

    To be called before a checkpoint is put around those modules, or its recomputation would see them uncast.
    """
    by_owner: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        by_owner.setdefault(path, []).append(leaf)
    for path, leaves in by_owner.items():
        run_on_views(model.get_submodule(path), {leaf: lambda param: param.to(dtype) for leaf in leaves})


def sum_gradients_of(model: nn.Module, groups: Mapping[str, Groups]) -> None:
    """From the next forward of `model` on, sum the gradients of the named parameters over their groups in
    backward.

    The sum is a hook on the parameter itself, wherever it is used. Materialising replaces parameters, so that
    the hooks are looked after whenever the model's forward begins.
    """
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
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    # In float32 at least: sums in bfloat16 lose small addends, and gloo's differ from rank to rank.
    wide = local.to(
        torch.promote_types(local.dtype, torch.float32), memory_format=torch.contiguous_format, copy=True
    )
    for group in groups:
        dist.all_reduce(wide, group=group)
    total = wide.to(local.dtype)
    if isinstance(gradient, DTensor):
        return DTensor.from_local(
            total,
            gradient.device_mesh,
            gradient.placements,
            run_check=False,
            shape=gradient.shape,
            stride=gradient.stride(),
        )
    return total
