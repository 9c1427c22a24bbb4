"""Gradients of a parallel model: partial ones summed, the norm over all ranks with what is replicated counted once, clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from parallelizer import torch_private


def sum_partial(parameters: Iterable[torch.Tensor]) -> None:
    """Sum over their axes the gradients that lie partial, so that each lies as its parameter does.

    Sequence parallelism leaves norms' gradients so. Done once here; an optimizer or a norm that meets partial gradients would
    reduce them again in every operation.
    """
    for param in parameters:
        gradient = param.grad
        if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
            param.grad = gradient.redistribute(placements=param.placements)


def grad_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm of all gradients, a float32 (or wider) scalar, the same on every rank.

    Parameters may be DTensors on different meshes and plain tensors, which count as replicated everywhere. One all-reduce for
    each axis that something is sharded over. Partial gradients must have been summed.
    """
    squares: dict[frozenset[tuple[str, str]], list[torch.Tensor]] = {}
    groups: dict[tuple[str, str], dist.ProcessGroup] = {}
    for param in parameters:
        gradient = param.grad
        if gradient is None:
            continue
        axes = set()
        if isinstance(gradient, DTensor):
            for i, placement in enumerate(gradient.placements):
                mesh = gradient.device_mesh
                if isinstance(placement, Replicate) or mesh.size(i) == 1:
                    continue
                group = mesh.get_group(i)
                key = ((mesh.mesh_dim_names or ())[i] if mesh.mesh_dim_names else str(i), group.group_name)
                groups[key] = group
                axes.add(key)
            gradient = gradient.to_local()
        squares.setdefault(frozenset(axes), []).append(gradient)
    if not squares:
        return torch.zeros(())
    sums = {axes: _sum_of_squares(gradients) for axes, gradients in squares.items()}
    for key in sorted(groups):
        # Everything still to be summed over this axis, by the axes that remain.
        over = [axes for axes in sums if key in axes]
        stacked = torch.stack([sums[axes] for axes in over])
        dist.all_reduce(stacked, group=groups[key])
        for axes, value in zip(over, stacked.unbind(), strict=True):
            del sums[axes]
            rest = axes - {key}
            sums[rest] = sums[rest] + value if rest in sums else value
    return sums[frozenset()].sqrt()


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """In float32, or wider where a gradient is."""
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch_private.norms([g.detach() for g in gradients if g.numel()])
    if not norms:
        return torch.zeros((), dtype=wide, device=gradients[0].device)
    return torch.stack([n.to(wide) for n in norms]).square().sum()


def scale_(parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every gradient in place by a scalar tensor."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), gradients in by_kind.items():
        torch_private.multiply_(gradients, factor.to(device=device, dtype=dtype))


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`. Returns the norm before, without a host read."""
    parameters = list(parameters)
    sum_partial(parameters)
    norm = grad_norm(parameters)
    scale_(parameters, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied with: `min(1, max_norm / (norm + 1e-6))`, as in torch."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
