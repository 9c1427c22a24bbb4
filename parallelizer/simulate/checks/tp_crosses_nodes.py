"""`tp-crosses-nodes`: the ranks that talk most, those of `tp`, do not share a node, and what that costs.

Ranks are counted node by node and `tp` is the innermost axis, so its groups are neighbours: they fit into nodes
whose number of ranks `tp` divides, and into no others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.ledger import Collective

GB = 1e9


def nodes_of(mesh: Mesh, hardware: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks on each node when machines of this `hardware` are filled; empty when it says nothing of them."""
    devices = int(hardware.get("devices_per_node") or 0)
    if not devices:
        return ()
    whole, rest = divmod(mesh.world_size, devices)
    return (devices,) * whole + ((rest,) if rest else ())


def tp_crosses_nodes(
    mesh: Mesh,
    nodes: Sequence[int],
    hardware: Mapping[str, Any],
    ledger: Sequence[Collective] = (),
) -> tuple[Diagnostic, ...]:
    """A warning when a group of `tp` has ranks on two nodes, of which `nodes` are the numbers of ranks.

    With the `ledger` of a step it says what is sent, and how much longer that takes at least by the bandwidths of
    `hardware` (`node_gb_per_s` a device inside a node, `network_gb_per_s` a device between nodes). A collective goes
    round in rings, which enter and leave a node by the network devices of those of its ranks that belong to the
    group: so its bandwidth is at most that of so many of them together.
    """
    tp = mesh.sizes["tp"]
    firsts = list(itertools.accumulate(nodes, initial=0))
    crossed = [first for first in firsts[1:-1] if first % tp]
    if not crossed:
        return ()
    group = crossed[0] // tp * tp
    spread = [
        share
        for first, last in itertools.pairwise(firsts)
        if (share := min(last, group + tp) - max(first, group)) > 0
    ]
    most = max(nodes)
    message = f"tp={tp} crosses nodes of {most} device{'s' if most > 1 else ''}"
    message += f": ranks {group} to {group + tp - 1} lie on {len(spread)} of them"
    sent = [e for e in ledger if "tp" in e.axis.split("+")]
    inside, outside = (float(hardware.get(key) or 0) for key in ("node_gb_per_s", "network_gb_per_s"))
    reach = min(spread) * outside
    if inside and outside:
        of = "" if min(spread) == 1 else f" ({min(spread)} x {outside:g})"
        message += f", where {reach:g} GB/s{of} are between nodes and {inside:g} inside one"
    if sent:
        bytes_sent = sum(e.wire_bytes for e in sent)
        message += f"; {_collectives(len(sent))} a step send {size(bytes_sent)} there"
        if 0 < reach < inside:
            longer = bytes_sent / GB * (1 / reach - 1 / inside)
            message += f", at least {_seconds(longer)} a step longer"
    help_text = f"parallel.mesh.tp={math.gcd(*nodes)} fits into a node; dp_shard or cp may be as much larger"
    return (Diagnostic("tp-crosses-nodes", message, mesh.spans.get("tp"), help_text, "warning"),)


def _collectives(number: int) -> str:
    return f"{number:,} collective{'' if number == 1 else 's'}"


def _seconds(time: float) -> str:
    """`4.5 s`, `12 ms`, `30 µs`."""
    if time >= 1:
        return f"{time:.1f} s"
    return f"{time * 1e3:.0f} ms" if time >= 1e-3 else f"{time * 1e6:.0f} µs"
