"""From axis sizes to a live DeviceMesh and back, and the sub-meshes that styles stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelizer import torch_private
from parallelizer.plan import AXES, BATCH_AXES, Mesh

FOLDED = "dp_shard+cp"
"""Name of the axis that parameters are sharded over when both `dp_shard` and `cp` are above 1."""


def build_mesh(mesh: Mesh, device: str) -> DeviceMesh:
    """A DeviceMesh over the initialised world: the axes above 1, and `dp_shard` wherever `fully_shard` needs one of size 1.

    Raises ValueError when the world has another size. Collective: every rank calls it.
    """
    names = [a for a in AXES if mesh.sizes[a] > 1]
    if not mesh.fsdp_axes:
        names = [a for a in AXES if a in names or a == "dp_shard"]
    device_mesh = init_device_mesh(device, tuple(mesh.sizes[a] for a in names), mesh_dim_names=tuple(names))
    fsdp_mesh(device_mesh)  # makes the folded group now, while every rank is here
    return device_mesh


def describe(device_mesh: DeviceMesh) -> Mesh:
    """The sizes of a DeviceMesh whose axes have our names. Raises ValueError on other names."""
    names = device_mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"the DeviceMesh has no axis names: name its axes out of {', '.join(AXES)}")
    return Mesh({n: device_mesh.size(i) for i, n in enumerate(names)})


def rename(device_mesh: DeviceMesh, axes: Mapping[str, str]) -> DeviceMesh:
    """The same ranks and groups under our axis names; `axes` maps a name in `device_mesh` to one of ours.

    Raises ValueError when a name is unknown on either side.
    """
    names = device_mesh.mesh_dim_names or ()
    wrong = [n for n in axes if n not in names] + [n for n in axes.values() if n not in AXES]
    if wrong:
        raise ValueError(f"no axis {wrong[0]!r}: the mesh has {', '.join(names)}, plans know {', '.join(AXES)}")
    groups = device_mesh.get_all_groups()
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        device_mesh.device_type,
        mesh=device_mesh.mesh if len(groups) > 1 else None,
        mesh_dim_names=tuple(axes.get(n, n) for n in names),
    )


def submesh(device_mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The sub-mesh of some axes, in the mesh's order."""
    ordered = tuple(a for a in AXES if a in axes)
    return device_mesh[ordered if len(ordered) > 1 else ordered[0]]


def fsdp_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh for `fully_shard`: the folded shard axis, with `dp_replicate` outside it when it is above 1."""
    mesh = describe(device_mesh)
    names = mesh.fsdp_axes
    sharded = torch_private.flatten_mesh(device_mesh[names], FOLDED) if len(names) > 1 else device_mesh[(names or ("dp_shard",))[0]]
    if mesh.sizes["dp_replicate"] > 1:
        return torch_private.join_meshes(device_mesh["dp_replicate"], sharded)
    return sharded


def folded_name(mesh: Mesh) -> str:
    """How the axis that FSDP shards over is written: `dp_shard`, `cp` or `dp_shard+cp`."""
    return "+".join(mesh.fsdp_axes) or "dp_shard"


def batch_rank(device_mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's index among those that see different rows of the global batch, and their number."""
    index, count = 0, 1
    names = device_mesh.mesh_dim_names or ()
    for axis in BATCH_AXES:
        if axis in names:
            size = device_mesh.size(names.index(axis))
            index = index * size + device_mesh.get_local_rank(axis)
            count *= size
    return index, count
