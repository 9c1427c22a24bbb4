"""The mesh as a picture: a row for each node, a cell for each rank, and which of them talk to one another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from parallelizer.compiler import Program
from parallelizer.mesh import FOLDED
from parallelizer.plan import AXES, Mesh
from parallelizer.show.html_table import css_class, table
from parallelizer.show.markup import Markup, join, tag
from parallelizer.show.plan import size
from parallelizer.show.sources import Sources
from parallelizer.simulate.trace import Trace

ALL = 16
"""So many nodes are all drawn; of more, the first, the last and those around the rank."""

MOST = 24

MEANING = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas of everything",
    "dp_shard": "shards of parameters, gradients and optimizer state",
    "cp": "parts of each sequence",
    "ep": "shares of the experts",
    "tp": "slices of each layer",
    FOLDED: "what fsdp shards over: both axes as one",
}


def section(program: Program, trace: Trace | None, hardware: Mapping[str, Any], rank: int, sources: Sources) -> Markup:
    """The picture, and what each axis means."""
    node = max(1, int(hardware.get("devices_per_node") or 8))
    return tag("div", _picture(program.mesh, node, rank), _axes(program, trace, node, rank, sources), class_="mesh")


def shown_nodes(mesh: Mesh, node: int, rank: int) -> list[int]:
    """The numbers of the nodes that show the structure: both ends of every axis, and the rank's own place on it."""
    count = -(-mesh.world_size // node)
    if count <= ALL:
        return list(range(count))
    where = mesh.coordinate(rank)
    for ends in ((0, 1, -1), (0, -1)):
        picks = [sorted({e % mesh.sizes[a] for e in ends} | {where[a]}) for a in AXES]
        nodes = {_rank(mesh, at) // node for at in itertools.product(*picks)}
        if len(nodes) <= MOST:
            break
    return sorted(nodes)


def _rank(mesh: Mesh, where: Sequence[int]) -> int:
    number = 0
    for axis, index in zip(AXES, where, strict=True):
        number = number * mesh.sizes[axis] + index
    return number


def _picture(mesh: Mesh, node: int, rank: int) -> Markup:
    axes = [a for a in AXES if mesh.sizes[a] > 1]
    nodes = shown_nodes(mesh, node, rank)
    across = [a for a in axes if len({mesh.coordinate(n * node)[a] for n in nodes}) > 1]
    inside = _heads(mesh, node, nodes, axes)
    wide = min(node, mesh.world_size)
    own = mesh.coordinate(rank)
    head = [
        tag("tr",
            [tag("th", join("node") if last else None, scope="col"),
             [tag("th", _swatch(a), a, scope="col") if last else tag("td") for a in across]] if last or across else tag("td"),
            [tag("th", label, scope="colgroup", colspan=span, class_="index") for label, span in cells])
        for last, cells in inside
    ]  # fmt: skip
    body: list[Markup] = []
    before = -1
    for number in nodes:
        if number != before + 1:
            gap = f"{number - before - 1:,} more nodes"
            body.append(tag("tr", tag("td", "⋮", class_="more"), tag("td", gap, colspan=len(across) + wide, class_="more")))
        first = mesh.coordinate(number * node)
        above = mesh.coordinate(before * node) if before >= 0 else {}
        body.append(
            tag(
                "tr",
                tag("th", number, scope="row"),
                [tag("td", first[a], class_="index" if above.get(a) != first[a] else "index same") for a in across],
                [_cell(mesh, r, own, axes, r % node) for r in range(number * node, min((number + 1) * node, mesh.world_size))],
            )
        )
        before = number
    caption = f"Ranks in nodes of {node}; marked are rank {rank} and the ranks that it talks to"
    return tag("div", tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body)), class_="picture scroll")


def _heads(mesh: Mesh, node: int, nodes: Sequence[int], axes: Sequence[str]) -> list[tuple[bool, list[tuple[Markup, int]]]]:
    """Rows of heads over the ranks of a node, outer axes first: labels and how many ranks each stands over, where all nodes agree."""
    wide = min(node, mesh.world_size)
    rows = []
    for axis in axes:
        patterns = {tuple(mesh.coordinate(n * node + i)[axis] for i in range(wide)) for n in nodes if (n + 1) * node <= mesh.world_size
                    or n == 0}  # fmt: skip
        pattern = patterns.pop()
        if not patterns and len(set(pattern)) > 1:
            runs = [(k, len(list(g))) for k, g in itertools.groupby(pattern)]
            rows.append([(join(_swatch(axis), f"{axis} {k}") if i == 0 else join(k), n) for i, (k, n) in enumerate(runs)])
    rows = rows or [[(join("rank"), wide)]]
    return [(i == len(rows) - 1, row) for i, row in enumerate(rows)]


def _cell(mesh: Mesh, rank: int, own: Mapping[str, int], axes: Sequence[str], index: int) -> Markup:
    where = mesh.coordinate(rank)
    differs = [a for a in axes if where[a] != own[a]]
    kind = "rank"
    if not differs:
        kind = "rank self"
    elif len(differs) == 1:
        kind = f"rank peer {css_class(differs[0])}"
    elif set(differs) <= set(mesh.fsdp_axes):
        kind = f"rank peer far {css_class(differs[0])}"
    before = mesh.coordinate(rank - 1) if index else where
    changed = [i for i, a in enumerate(reversed(axes)) if before[a] != where[a]]
    return tag("td", rank, class_=f"{kind} gap" if changed and max(changed) > 0 else kind)


def _axes(program: Program, trace: Trace | None, node: int, rank: int, sources: Sources) -> Markup | None:
    mesh = program.mesh
    groups = [(a,) for a in AXES if mesh.sizes[a] > 1]
    if len(mesh.fsdp_axes) > 1:
        groups.append(mesh.fsdp_axes)
    if not groups:
        return tag("p", "One rank: nothing is split.", class_="quiet")
    rows = []
    for group in groups:
        name = "+".join(group)
        ranks = _group(mesh, group, rank)
        sent = sum(e.wire_bytes for e in trace.ledger if e.axis == name) if trace else None
        rows.append([
            [_swatch(name), name.replace("+", "\u200b+")],
            sources.link(mesh.spans.get(name), text=f"{mesh.sizes[name]:,}") if name in mesh.spans else f"{mesh.size(*group):,}",
            [MEANING[name], tag("span", f"{_listed(ranks)}, {_reach(ranks, node)}", class_="quiet block")],
            "–" if sent is None else size(sent) if sent else "nothing",
        ])
    heads = ["axis", "#size", f"splits into; rank {rank} talks to", "#sent"]
    return table("Axes, outermost first", heads, rows)


def _group(mesh: Mesh, axes: Sequence[str], rank: int) -> list[int]:
    """The ranks that differ from `rank` on `axes` alone, itself too."""
    own = mesh.coordinate(rank)
    choices = [range(mesh.sizes[a]) if a in axes else (own[a],) for a in AXES]
    return [_rank(mesh, where) for where in itertools.product(*choices)]


def _listed(ranks: Sequence[int]) -> str:
    """`0–7`, `0, 8`, `0, 16, … 16368`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def _reach(ranks: Sequence[int], node: int) -> str:
    nodes = len({r // node for r in ranks})
    return "inside one node" if nodes == 1 else f"across {nodes:,} nodes"


def _swatch(axis: str) -> Markup:
    return tag("span", class_=f"swatch {css_class(axis)}")
