"""What a step's collectives take at least on the links of the hardware, by the bytes of the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.ledger import Collective


def link_seconds(ledger: Iterable[Collective], mesh: Mesh, hardware: Mapping[str, Any]) -> float | None:
    """Seconds that one rank's bytes of a step need at the rates of `hardware`: `node_gb_per_s` a device for a group that lies in
    one node, `network_gb_per_s` for any other. None where a rate is not known. Latencies, and what several collectives do to each
    other, are not counted.
    """
    inside, outside = (float(hardware.get(key) or 0) for key in ("node_gb_per_s", "network_gb_per_s"))
    node = int(hardware.get("devices_per_node") or 0)
    if not inside or not node or (not outside and mesh.world_size > node):
        return None
    spans = _spans(mesh)
    total = 0.0
    for one in ledger:
        span = max((spans.get(axis, mesh.world_size) for axis in one.axis.split("+")), default=1)
        total += one.wire_bytes / ((inside if span <= node else outside) * 1e9)
    return total


def _spans(mesh: Mesh) -> dict[str, int]:
    """How many neighbouring ranks a group of each axis reaches over: the axis and all that lie inside of it."""
    spans, inner = {}, 1
    for axis, size in reversed(list(mesh.sizes.items())):
        inner *= size
        spans[axis] = inner
    return spans
