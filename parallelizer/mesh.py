"""From axis sizes to a live DeviceMesh and back, the sub-meshes that styles stand on, and what of a tensor a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelizer import torch_private
from parallelizer.language.plan import (
    AXES,
    BATCH_AXES,
    DATA_AXES,
    EXPERT,
    EXPERT_SHARDS,
    FOLDED,
    REPLICA_AXES,
    Mesh,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def build_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """Make a DeviceMesh over the initialised world: the axes above 1, and `dp_shard` wherever `fully_shard`
    needs an axis of size 1.

    Raises ValueError if the world has another size. Collective: every rank calls it.
    """
    if mesh.world_size != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.world_size} ranks ({mesh}), the world has {dist.get_world_size()}"
        )
    names = [a for a in AXES if mesh.sizes[a] > 1]
    if not mesh.fsdp_axes:
        names = [a for a in AXES if a in names or a == "dp_shard"]
    device_mesh = init_device_mesh(device, tuple(mesh.sizes[a] for a in names), mesh_dim_names=tuple(names))
    fsdp_mesh(device_mesh)  # makes the folded group now, while every rank is here
    return share_experts(device_mesh, mesh.ep)


def share_experts(device_mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """Say that experts are shared out among `ep` ranks of the DeviceMesh, which are taken out of the ranks of `dp_shard`,
    `cp` and `tp`, innermost first. Returns the DeviceMesh, whose axes have our names.

        mesh = share_experts(init_device_mesh("cuda", (16, 2), mesh_dim_names=("dp_shard", "tp")), 8)

    Collective if `ep` is above 1: every rank calls it. Raises ValueError for names that are not ours, an `ep` that does not
    divide those ranks, and another `ep` than it has.
    """
    found = device_mesh.__dict__.get(_EXPERTS)
    if found is None and ep > 1:
        Mesh(describe(device_mesh).sizes, ep=ep)
        found = device_mesh.__dict__[_EXPERTS] = _expert_mesh(device_mesh, ep)
    if (1 if found is None else found.size(1)) != ep:
        raise ValueError(
            f"the DeviceMesh shares experts out among {describe(device_mesh).ep} ranks, not among {ep}"
        )
    return device_mesh


_EXPERTS = "_parallelizer_experts"


def _expert_mesh(device_mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """The ranks of a replica as [efsdp, ep], under the same root."""
    names = tuple(n for n in device_mesh.mesh_dim_names or () if n in REPLICA_AXES)
    ranks = device_mesh[names] if len(names) > 1 else device_mesh[names[0]]
    flat = torch_private.flatten_mesh(ranks, "replica") if len(names) > 1 else ranks
    name = (flat.mesh_dim_names or ("",))[0]
    return torch_private.split_axis(flat, name, {EXPERT_SHARDS: flat.size() // ep, EXPERT: ep})


def expert_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh [efsdp, ep] of a DeviceMesh that shares experts out."""
    found: DeviceMesh = device_mesh.__dict__[_EXPERTS]
    return found


def places(device_mesh: DeviceMesh, *, of_experts: bool = False) -> dict[str, tuple[int, int]]:
    """The size of every axis and this rank's index on it; empty on a rank outside of the mesh. For parameters of experts that are
    shared out, `efsdp` and `ep` stand for the axes of a replica.
    """
    meshes = [device_mesh, *([expert_mesh(device_mesh)] if of_experts else [])]
    found: dict[str, tuple[int, int]] = {}
    for mesh in meshes:
        here = zip(mesh.mesh_dim_names or (), mesh.shape, mesh.get_coordinate() or (), strict=False)
        found |= {axis: (size, index) for axis, size, index in here}
    return {axis: at for axis, at in found.items() if not (of_experts and axis in REPLICA_AXES)}


def expert_fsdp_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that fsdp shards experts over: what `ep` leaves of a replica, with `dp_replicate` outside it if it is above 1."""
    sharded = expert_mesh(device_mesh)[EXPERT_SHARDS]
    if describe(device_mesh).sizes["dp_replicate"] > 1:
        return torch_private.join_meshes(device_mesh["dp_replicate"], sharded)
    return sharded


def describe(device_mesh: DeviceMesh) -> Mesh:
    """The sizes of a DeviceMesh whose axes have our names, in our order. Raises ValueError for any other: see
    `rename_axes`.
    """
    names = device_mesh.mesh_dim_names or ()
    known = [a for a in AXES if a in names]
    if not names or list(names) != known:
        raise ValueError(_unknown_axes(names))
    shared = device_mesh.__dict__.get(_EXPERTS)
    sizes = {n: device_mesh.size(i) for i, n in enumerate(names)}
    return Mesh(sizes, ep=1 if shared is None else shared.size(1))


def rename_axes(device_mesh: DeviceMesh, axes: Mapping[str, str] | None = None) -> DeviceMesh:
    """A DeviceMesh of the same ranks and process groups under our axis names (`pp`, `dp_replicate`,
    `dp_shard`, `cp`, `tp_outer`, `tp`) and in our order, which all other functions need.

        mesh = rename_axes(mesh, {"data_parallel": "dp_shard", "tensor_parallel": "tp"})

    `axes` maps names in `device_mesh` to ours. Omit a name that is ours already; an axis of size 1 that is
    omitted is dropped. No communication; a second call returns the same mesh. Raises ValueError if a name
    on either side is unknown or given twice; the message proposes the usual mapping.
    """
    axes, names = dict(axes or {}), device_mesh.mesh_dim_names or ()
    if missing := [n for n in axes if n not in names]:
        raise ValueError(f"the DeviceMesh has no axis {missing[0]!r}: it has ({', '.join(names)})")
    if unknown := [n for n in axes.values() if n not in AXES]:
        raise ValueError(f"plans know no axis {unknown[0]!r}: they know ({', '.join(AXES)})")
    made: dict[object, DeviceMesh] = device_mesh.__dict__.setdefault("_parallelizer_renamed", {})
    key = tuple(sorted(axes.items()))
    if key not in made:
        made[key] = _renamed(device_mesh, axes)
    return made[key]


def _renamed(device_mesh: DeviceMesh, axes: Mapping[str, str]) -> DeviceMesh:
    # An unknown axis of one rank splits nothing.
    names = device_mesh.mesh_dim_names or ()
    kept = tuple(n for i, n in enumerate(names) if axes.get(n, n) in AXES or device_mesh.size(i) > 1)
    ours = [axes.get(n, n) for n in kept]
    if not kept or any(n not in AXES for n in ours):
        raise ValueError(_unknown_axes(names))
    if len(set(ours)) < len(ours):
        raise ValueError(f"two axes of the DeviceMesh would have one name: {', '.join(ours)}")
    if kept != names:
        device_mesh = device_mesh[kept if len(kept) > 1 else kept[0]]
    order = sorted(range(len(ours)), key=lambda i: AXES.index(ours[i]))
    in_order = tuple(ours[i] for i in order)
    if in_order == kept:
        return device_mesh
    groups = [device_mesh.get_group(i) for i in order]
    # Its own root, which all its sub-meshes share: `fully_shard` joins a data axis with a tensor axis only
    # under one root.
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_mesh.device_type, mesh_dim_names=in_order)
    ranks = device_mesh.mesh.permute(order)
    return DeviceMesh.from_group(groups, device_mesh.device_type, mesh=ranks, mesh_dim_names=in_order)


USUALLY = {
    "dp": "dp_shard", "fsdp": "dp_shard", "data": "dp_shard", "data_parallel": "dp_shard", "shard": "dp_shard",
    "ddp": "dp_replicate", "replicate": "dp_replicate", "hsdp": "dp_replicate",
    "model": "tp", "mp": "tp", "tensor": "tp", "tensor_parallel": "tp",
    "context": "cp", "context_parallel": "cp", "sp": "cp", "sequence": "cp", "sequence_parallel": "cp",
    "pipeline": "pp", "pipe": "pp",
}  # fmt: skip
"""What names of other code bases usually mean. Proposed in messages; a wrong guess would train something else."""


def _unknown_axes(names: Sequence[str]) -> str:
    """What to say of a DeviceMesh whose axes have these names."""
    if not names:
        return f"the DeviceMesh has no axis names: make it with mesh_dim_names out of ({', '.join(AXES)})"
    meant = {n: n if n in AXES else USUALLY.get(n.lower(), "") for n in names}
    guessed = all(meant.values()) and len(set(meant.values())) == len(names)
    shown = {n: m for n, m in meant.items() if n != m} if guessed else {names[0]: "dp_shard"}
    how = "in another order" if not shown else f"{'perhaps' if guessed else 'as in'} axes={shown}"
    return (
        f"the axes of the DeviceMesh are ({', '.join(names)}), and plans know ({', '.join(AXES)}), in this order: say which "
        f"is which ({how}), or once for all by parallelizer.rename_axes(mesh, axes)"
    )


def with_shard_axis(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh with an axis `dp_shard` of size 1 if it has none to shard over, as `fully_shard` needs one.

    Collective over all ranks of the root mesh, unless the mesh is returned as it is.
    """
    mesh, names = describe(device_mesh), device_mesh.mesh_dim_names or ()
    if mesh.fsdp_axes or "dp_shard" in names:
        return device_mesh
    outside = [n for n in names if AXES.index(n) < AXES.index("dp_shard")]
    if outside:
        axis, into = outside[-1], {outside[-1]: mesh.sizes[outside[-1]], "dp_shard": 1}
    else:
        axis, into = names[0], {"dp_shard": 1, names[0]: mesh.sizes[names[0]]}
    made = torch_private.split_axis(device_mesh, axis, into)
    if _EXPERTS in device_mesh.__dict__:
        made.__dict__[_EXPERTS] = expert_mesh(device_mesh)
    return made


def submesh(device_mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The sub-mesh of some axes, in the mesh's order."""
    ordered = tuple(a for a in AXES if a in axes)
    return device_mesh[ordered if len(ordered) > 1 else ordered[0]]


def fsdp_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh for `fully_shard`: the folded shard axis, with `dp_replicate` outside it when it is above 1.

    Without an axis above 1 to shard over the mesh must have a `dp_shard` of size 1: see `with_shard_axis`.
    """
    mesh = describe(device_mesh)
    names = mesh.fsdp_axes or ("dp_shard",)
    sharded = (
        torch_private.flatten_mesh(device_mesh[names], FOLDED) if len(names) > 1 else device_mesh[names[0]]
    )
    if mesh.sizes["dp_replicate"] > 1:
        return torch_private.join_meshes(device_mesh["dp_replicate"], sharded)
    return sharded


def data_groups(device_mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups above one rank whose ranks see different tokens: sums over all of them are sums over all
    tokens.
    """
    if describe(device_mesh).size(*DATA_AXES) == 1:
        return []
    return [g for g in fsdp_mesh(device_mesh).get_all_groups() if g.size() > 1]


def batch_rank(device_mesh: DeviceMesh, *, axes: Mapping[str, str] | None = None) -> tuple[int, int]:
    """This rank's index among the ranks that have different rows of the global batch, and the number of
    these ranks.

    `axes` renames the axes of a DeviceMesh with other names, as in `rename_axes`. Raises ValueError for
    axes whose names are not ours.
    """
    device_mesh = rename_axes(device_mesh, axes)
    mesh, index = describe(device_mesh), 0
    for axis in BATCH_AXES:
        if mesh.sizes[axis] > 1:
            index = index * mesh.sizes[axis] + device_mesh.get_local_rank(axis)
    return index, mesh.size(*BATCH_AXES)


def cut(size: int, ranks: int, index: int) -> tuple[int, int]:
    """Where the shard of one of `ranks` begins in a dimension of `size`, and how long it is.

    As `torch.chunk` and DTensor cut: ceil(size / ranks) for each rank, the last ones shorter or empty. A tensor [size, ...]
    is [length, ...] on rank `index`, its `narrow(0, start, length)`; an empty shard begins at `size`.
    """
    longest = -(-size // ranks)
    start = min(size, index * longest)
    return start, min(longest, size - start)


def cut_all(
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> list[tuple[int, int]]:
    """(start, length) of every dimension of a tensor of `shape` that the rank at `coordinate` of the mesh holds.

    One dimension may be cut by several axes: by tensor axes first, in the mesh's order, then by the data axes, as FSDP does.
    """
    names = device_mesh.mesh_dim_names or tuple("" for _ in placements)
    data = [any(part in (*DATA_AXES, EXPERT_SHARDS) for part in name.split("+")) for name in names]
    held = [(0, size) for size in shape]
    for i in sorted(range(len(data)), key=lambda i: data[i]):
        if placements[i].is_replicate():
            continue
        dim: int = placements[i].dim % len(shape)  # type: ignore[attr-defined]
        outer, size = held[dim]
        start, length = cut(size, device_mesh.size(i), coordinate[i])
        held[dim] = (outer + start, length)
    return held
