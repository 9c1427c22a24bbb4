"""Gradients of a parallel model: the norm over all ranks, in which replicated gradients count once, and clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from parallelizer import torch_private
from parallelizer.runtime.partial_gradients import sum_partial

Axis = tuple[str, tuple[int, ...]]
"""One axis of one mesh: its name, and the ranks of its process group. Not the group's own name: torch remembers what operators
return, so a tensor may lie on an equal mesh of an earlier model of this process, whose groups have other names.
"""


def grad_norm(parameters: Iterable[torch.Tensor], stages: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Euclidean norm of all gradients, a float32 (or wider) scalar, the same on every rank.

    Parameters may be DTensors on different meshes and plain tensors, which count as replicated everywhere.
    One all-reduce for each axis that something is sharded over. Partial gradients must have been summed.
    Collective: a parameter without a gradient counts as zero, but where it is sharded this rank takes part in
    the sum all the same. The ranks of `stages`, those of a pipeline, have other parameters; the norm is that of all.
    """
    squares: dict[frozenset[Axis], list[torch.Tensor]] = {}
    groups: dict[Axis, dist.ProcessGroup] = {}
    ranks_of: dict[str, tuple[int, ...]] = {}
    device: torch.device | None = None
    for param in parameters:
        gradient = param.grad
        if gradient is None and not isinstance(param, DTensor):
            continue
        over = _sharding_groups(param if gradient is None else gradient, ranks_of)
        if device is None and isinstance(param, DTensor):
            device = torch.device(param.device_mesh.device_type)
        groups.update(over)
        local = own_part(param.detach()).new_empty(0) if gradient is None else own_part(gradient)
        squares.setdefault(frozenset(over), []).append(local)
    if not squares and stages is None:
        return torch.zeros(())
    if not squares:
        squares[frozenset()] = [torch.zeros(0)]
    every = [g for gradients in squares.values() for g in gradients]
    wide = torch.float64 if any(g.dtype == torch.float64 for g in every) else torch.float32
    # Offloaded gradients lie on the CPU, and NCCL takes no tensor from there: the mesh's device is the one that counts.
    on_device = (g.device for g in every if g.device.type != "cpu")
    device = next(on_device, every[0].device if device is None else device)
    sums = {axes: _sum_of_squares(gradients, wide, device) for axes, gradients in squares.items()}
    for axis, group in groups.items():  # in the order of the parameters, which is the same on every rank
        # Everything still to be summed over this axis, by the axes that remain.
        waiting = [axes for axes in sums if axis in axes]
        stacked = torch.stack([sums[axes] for axes in waiting])
        dist.all_reduce(stacked, group=group)
        for axes, value in zip(waiting, stacked.unbind(), strict=True):
            del sums[axes]
            rest = axes - {axis}
            sums[rest] = sums[rest] + value if rest in sums else value
    total = sums[frozenset()]
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def _sharding_groups(
    tensor: torch.Tensor, ranks_of: dict[str, tuple[int, ...]]
) -> dict[Axis, dist.ProcessGroup]:
    """The groups over which a tensor's elements lie scattered. `ranks_of` keeps the ranks of each group, by its name."""
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    groups: dict[Axis, dist.ProcessGroup] = {}
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    for i, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate) and mesh.size(i) > 1:
            group = mesh.get_group(i)
            if group.group_name not in ranks_of:
                ranks_of[group.group_name] = tuple(dist.get_process_group_ranks(group))
            groups[names[i], ranks_of[group.group_name]] = group
    return groups


def _sum_of_squares(gradients: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    norms = torch_private.norms([g for g in gradients if g.numel()], dtype)
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack([n.to(device) for n in norms]).square().sum()


def scale_(parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every gradient in place by a scalar tensor."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            local = own_part(param.grad)
            by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), gradients in by_kind.items():
        torch_private.multiply_(gradients, factor.to(device=device, dtype=dtype))


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part. Of a gradient it is the tensor itself, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`. Returns the norm before
    clipping, without a host read.
    """
    parameters = list(parameters)
    sum_partial(parameters)
    norm = grad_norm(parameters)
    scale_(parameters, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied with: `min(1, max_norm / (norm + 1e-6))`, as in torch."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
