"""Checks that replicated tensors are equal on all ranks: compares a checksum of each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.runtime.guards.checksum import checksum, digest


class Unequal(NamedTuple):
    """An axis whose ranks hold different values, and the tensors that differ: none on a rank whose own group is alike."""

    axis: str
    names: list[str]


def unequal_over(
    tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, axes: Sequence[str]
) -> Unequal | None:
    """The last of the axes over which ranks hold different bytes in any of the plain tensors; None, on every rank of the
    mesh, where they hold the same. With other names, shapes or dtypes on another rank, all tensors are named.

    Collective over the mesh: for each axis two reductions of 16 bytes, one of 16 bytes a tensor, and three host reads. A
    mesh of torch's fake backend compares nothing.
    """
    groups = {axis: mesh.get_group(axis) for axis in axes}
    if not groups or any(dist.get_backend(group) == "fake" for group in groups.values()):
        return None
    device = torch.device(mesh.device_type)
    found = [_names_that_differ(tensors, group, device) for group in groups.values()]
    # So that all ranks stop, also those of groups in which all are alike.
    last = torch.tensor(max((i for i, names in enumerate(found) if names), default=-1), device=device)
    for group in groups.values():
        dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
    place = int(last)
    return None if place < 0 else Unequal(list(groups)[place], found[place])


def _names_that_differ(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> list[str]:
    names = sorted(tensors)
    form = digest([(name, tuple(tensors[name].shape), str(tensors[name].dtype)) for name in names])
    # The least is the greatest of the opposites: one reduction finds both. It comes first, because ranks with other
    # tensors would reduce another number of sums.
    forms = torch.tensor([form, ~form], device=device)
    dist.all_reduce(forms, dist.ReduceOp.MAX, group=group)
    if int(forms[0]) != ~int(forms[1]):
        return names or ["everything"]
    if not names:
        return []
    sums = torch.stack([checksum(tensors[name]).to(device) for name in names])
    bounds = torch.stack([sums, ~sums])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    differs = (bounds[0] != ~bounds[1]).tolist()
    return [name for name, other in zip(names, differs, strict=True) if other]
