"""The collectives that torch runs, by the names of their operators, and the axis that a group of ranks belongs to."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.mesh import describe, expert_mesh, fsdp_mesh

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
    "isend": "send",
    "irecv": "recv",
}
"""The kind of a collective by the name of its operator."""


def axes_by_ranks(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """The axis of each group above one rank, by its ranks: DTensor takes equal meshes for one, and may use
    another's groups.
    """
    axes: dict[tuple[int, ...], str] = {}
    for each in (mesh, fsdp_mesh(mesh), *expert_meshes(mesh)):
        for index, axis in enumerate(each.mesh_dim_names or ()):
            axes.setdefault(tuple(dist.get_process_group_ranks(each.get_group(index))), axis)
    return axes


def expert_meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, ...]:
    """The mesh [efsdp, ep], if experts are shared out."""
    return (expert_mesh(mesh),) if describe(mesh).ep > 1 else ()
