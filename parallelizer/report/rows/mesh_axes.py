"""The rows of the tables of axes: those above 1, how far apart their ranks lie, and whom a rank talks to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallelizer.language.plan import AXES, EXPERT, EXPERT_SHARDS, Mesh
from parallelizer.simulate.record.trace import Trace


@dataclass(frozen=True)
class AxisRow:
    """An axis of the mesh, or several that are used as one. Neighbours on it are `stride` ranks apart."""

    axes: tuple[str, ...]
    size: int
    stride: int

    @property
    def name(self) -> str:
        """`tp`, `dp_shard+cp`."""
        return "+".join(self.axes)

    @property
    def is_folded(self) -> bool:
        """Whether it is several axes as one."""
        return len(self.axes) > 1


def axis_rows(mesh: Mesh) -> list[AxisRow]:
    """The axes above 1, outermost first, then those that fsdp shards over, if they are several, and what experts lie on."""
    rows, stride = [], mesh.world_size
    for axis in AXES:
        stride //= mesh.sizes[axis]
        if mesh.sizes[axis] > 1:
            rows.append(AxisRow((axis,), mesh.sizes[axis], stride))
    if len(mesh.fsdp_axes) > 1:
        sharding = [row for row in rows if row.name in mesh.fsdp_axes]
        ranks = math.prod(row.size for row in sharding)
        rows.append(AxisRow(tuple(mesh.fsdp_axes), ranks, sharding[-1].stride))
    if mesh.ep > 1:
        rows.append(AxisRow((EXPERT,), mesh.ep, 1))
    if mesh.ep > 1 and mesh.size_of(EXPERT_SHARDS) > 1:
        rows.append(AxisRow((EXPERT_SHARDS,), mesh.size_of(EXPERT_SHARDS), mesh.ep))
    return rows


def group_of(mesh: Mesh, axes: Sequence[str], rank: int) -> list[int]:
    """The ranks that differ from `rank` on `axes` alone, itself too."""
    own = mesh.coordinate(rank)
    if EXPERT in axes or EXPERT_SHARDS in axes:
        shard, place = mesh.expert_place(rank)
        first = rank - (shard * mesh.ep + place)  # the ranks of a replica are neighbours
        ep = [first + shard * mesh.ep + i for i in range(mesh.ep)]
        return (
            ep
            if EXPERT in axes
            else [first + i * mesh.ep + place for i in range(mesh.size_of(EXPERT_SHARDS))]
        )
    choices = [range(mesh.sizes[a]) if a in axes else (own[a],) for a in AXES]
    return [rank_at(mesh, where) for where in itertools.product(*choices)]


def rank_at(mesh: Mesh, where: Sequence[int]) -> int:
    """The rank with a coordinate, outermost axis first."""
    number = 0
    for axis, index in zip(AXES, where, strict=True):
        number = number * mesh.sizes[axis] + index
    return number


def sent_over(trace: Trace, axis: str) -> int:
    """The bytes that the rank sends over an axis in a step."""
    return sum(e.wire_bytes for e in trace.ledger if e.axis == axis)
