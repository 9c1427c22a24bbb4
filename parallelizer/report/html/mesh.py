"""The mesh as a picture: a row for each node, a cell for each rank, and which of them talk to one another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from parallelizer.diagnostics.units import size
from parallelizer.language.plan import AXES, AXIS_MEANINGS, FOLDED, Mesh
from parallelizer.report.html.markup import Markup, join, tag
from parallelizer.report.html.sources import Sources
from parallelizer.report.html.table import css_class, swatch, table
from parallelizer.report.rows.mesh_axes import axis_rows, group_of, rank_at, sent_over
from parallelizer.simulate.record.trace import Trace
from parallelizer.styles.application import Program

ALL = 16
"""So many nodes are all drawn; of more, the first, the last and those around the rank."""

MOST = 24

MEANING = {
    **AXIS_MEANINGS,
    FOLDED: "what fsdp shards over: both axes as one",
}


def section(
    program: Program, trace: Trace | None, hardware: Mapping[str, Any], rank: int, sources: Sources
) -> Markup:
    """The picture, and what each axis means."""
    if program.mesh.world_size == 1:
        return tag("p", "One rank: nothing is split.", class_="quiet")
    node = max(1, int(hardware.get("devices_per_node") or 8))
    return tag(
        "div", picture(program.mesh, node, rank), _axes(program, trace, node, rank, sources), class_="mesh"
    )


def shown_nodes(mesh: Mesh, node: int, rank: int) -> list[int]:
    """The numbers of the nodes that show the structure: both ends of every axis, and the rank's own place on
    it.
    """
    count = -(-mesh.world_size // node)
    if count <= ALL:
        return list(range(count))
    where = mesh.coordinate(rank)
    for ends in ((0, 1, -1), (0, -1)):
        picks = [sorted({e % mesh.sizes[a] for e in ends} | {where[a]}) for a in AXES]
        nodes = {rank_at(mesh, at) // node for at in itertools.product(*picks)}
        if len(nodes) <= MOST:
            break
    return sorted(nodes)


def picture(mesh: Mesh, node: int, rank: int) -> Markup:
    """A row for each shown node, a cell for each of its ranks; marked are `rank` and those that it shares an
    axis with.
    """
    axes = [a for a in AXES if mesh.sizes[a] > 1]
    nodes = shown_nodes(mesh, node, rank)
    across = [a for a in axes if len({mesh.coordinate(n * node)[a] for n in nodes}) > 1]
    wide = min(node, mesh.world_size)
    own = mesh.coordinate(rank)
    rows: list[Markup] = []
    before = -1
    above: Mapping[str, int] = {}
    for number in nodes:
        if number != before + 1:
            gap = tag("td", f"{number - before - 1:,} more nodes", colspan=len(across) + wide, class_="more")
            rows.append(tag("tr", tag("td", "⋮", class_="more"), gap))
        ranks = range(number * node, min((number + 1) * node, mesh.world_size))
        first = mesh.coordinate(ranks[0])
        places = [tag("td", first[a], class_="same" if above.get(a) == first[a] else None) for a in across]
        rows.append(
            tag(
                "tr",
                tag("th", number, scope="row"),
                places,
                [_cell(mesh, r, own, axes, r % node) for r in ranks],
            )
        )
        before, above = number, first
    caption = tag(
        "caption", f"Ranks in nodes of {node}; marked are rank {rank} and the ranks that it talks to"
    )
    head = tag("thead", _heads(mesh, node, nodes, axes, across))
    return tag("div", tag("table", caption, head, tag("tbody", rows)), class_="picture scroll")


def _heads(
    mesh: Mesh, node: int, nodes: Sequence[int], axes: Sequence[str], across: Sequence[str]
) -> list[Markup]:
    """Over the ranks of a node their index on each axis, outer axes first, where it is the same in all
    nodes.
    """
    wide = min(node, mesh.world_size)
    full = [n for n in nodes if (n + 1) * node <= mesh.world_size] or [0]
    rows: list[list[Markup]] = []
    for axis in axes:
        patterns = {tuple(mesh.coordinate(n * node + i)[axis] for i in range(wide)) for n in full}
        pattern = patterns.pop()
        if patterns or len(set(pattern)) == 1:
            continue
        runs = [(index, len(list(group))) for index, group in itertools.groupby(pattern)]
        labels = [join(swatch(axis), f"{axis} {runs[0][0]}"), *(join(index) for index, _ in runs[1:])]
        spans = [span for _, span in runs]
        rows.append([
            tag("th", label, scope="colgroup", colspan=span, class_="index") for label, span in zip(labels, spans, strict=True)
        ])  # fmt: skip
    rows = rows or [[tag("th", "ranks", scope="colgroup", colspan=wide, class_="index")]]
    named = [tag("th", "node", scope="col"), *(tag("th", swatch(a), a, scope="col") for a in across)]
    blank = tag("td", colspan=len(named))
    return [tag("tr", blank if row is not rows[-1] else named, row) for row in rows]


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


def _axes(program: Program, trace: Trace | None, node: int, rank: int, sources: Sources) -> Markup:
    mesh = program.mesh
    rows = []
    for row in axis_rows(mesh):
        name, count = row.name, f"{row.size:,}"
        ranks = group_of(mesh, row.axes, rank)
        rows.append(
            [
                [
                    tag("span", swatch(name), name, class_="together"),
                    " = ",
                    sources.link(mesh.spans.get(name), text=count) or count,
                ],
                [
                    MEANING[name],
                    tag("span", f"{_listed(ranks)}, {_reach(ranks, node)}", class_="quiet block"),
                ],
                _sent(mesh, name, sent_over(trace, name) if trace else None),
            ]
        )
    heads = ["axis", f"splits into; rank {rank} talks to", "#sent"]
    return table("Axes, outermost first", heads, rows, cards=False)


def _sent(mesh: Mesh, name: str, sent: int | None) -> str:
    if sent is None:
        return "–"
    if not sent and len(mesh.fsdp_axes) > 1 and name in mesh.fsdp_axes:
        return "folded"
    return size(sent) if sent else "nothing"


def _listed(ranks: Sequence[int]) -> str:
    """`0–7`, `0, 8`, `0, 16, … 16368`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def _reach(ranks: Sequence[int], node: int) -> str:
    nodes = len({r // node for r in ranks})
    return "inside one node" if nodes == 1 else f"across {nodes:,} nodes"
