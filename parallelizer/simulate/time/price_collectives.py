"""The time of a collective, by how its ranks lie on nodes.

Inside a node it is measured (NCCL on 2, 4 and 8 devices), or bytes over the links. Between nodes it is the ring's: each rank
sends `wire_bytes`, and the ring passes each node's border once. A group with g ranks on every node runs g rings beside each
other, each through another network adapter, so that its bus bandwidth is g adapters', at most that of the links inside the node.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.time.constants import HOP_SECONDS, Constants
from parallelizer.simulate.time.machine import Machine


@dataclass(frozen=True)
class Spread:
    """How the ranks of one group lie: `ranks` of them, `local` on each of `nodes`."""

    ranks: int
    local: int
    nodes: int


def spread_of(axis: str, mesh: Mesh, per_node: int) -> Spread:
    """How a group of the axis lies when nodes are filled rank after rank; of groups that lie differently, the one on most nodes,
    for which the others wait. Folded axes are named with a plus.
    """
    names = axis.split("+")
    sizes: Mapping[str, int] = mesh.sizes
    if not all(name in sizes for name in names):
        ranks = mesh.world_size
        return Spread(ranks, min(ranks, per_node), -(-ranks // per_node))
    return _spread(tuple((size, name in names) for name, size in sizes.items()), per_node)


@functools.cache
def _spread(axes: tuple[tuple[int, bool], ...], per_node: int) -> Spread:
    """Of the axes with these sizes, the last of which has neighbouring ranks: those that are true are the group's."""
    members, others, inside = [0], [0], 1
    for size, is_named in reversed(axes):
        steps = range(0, size * inside, inside)
        if is_named:
            members = [step + member for step in steps for member in members]
        else:
            others = [step + other for step in steps for other in others]
        inside *= size
    # Groups whose first ranks lie alike in their nodes lie alike.
    nodes = max(
        len({(first + member) // per_node for member in members})
        for first in {other % per_node for other in others}
    )
    return Spread(len(members), -(-len(members) // nodes), nodes)


def collective_seconds(
    entry: Collective, mesh: Mesh, machine: Machine, constants: Constants, *, payload: float = 1.0
) -> float:
    """The time from the last rank's start to the end; `payload` is what the bytes are multiplied by."""
    spread = spread_of(entry.axis, mesh, machine.per_node)
    size, wire = entry.payload_bytes * payload, entry.wire_bytes * payload
    if entry.kind in ("send", "recv"):
        inside = spread.nodes == 1
        measured = machine.collective_seconds("send", 2, int(size)) if inside else None
        if measured is not None:
            return measured
        bandwidth = machine.node if inside else machine.network * constants.network
        return size / bandwidth + (machine.kernel_seconds if inside else HOP_SECONDS)
    measured = machine.collective_seconds(entry.kind, min(entry.ranks, spread.local), int(size))
    if spread.nodes == 1:
        return measured if measured is not None else wire / machine.node + 2 * machine.kernel_seconds
    bus = machine.network * constants.network * spread.local
    if measured is not None:
        # What the links inside the node take for the same bytes bounds the rings.
        crossing = {"all_reduce": 2.0}.get(entry.kind, 1.0) * (spread.local - 1) / spread.local
        bus = min(bus, crossing * size / measured)
    elif spread.local > 1:
        bus = min(bus, machine.node)
    steps = 2 if entry.kind == "all_reduce" else 1
    return wire / bus + steps * spread.nodes * HOP_SECONDS
