"""What one rank sends in a step, on a page: for each layer over each axis, and in total by phase, axis and
kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.units import size
from parallelizer.report.html.charts import Bar, axis_label, edges, mirrored, ticks
from parallelizer.report.html.markup import Child, Markup, join, tag
from parallelizer.report.html.sources import Sources
from parallelizer.report.html.table import css_class, swatch, table
from parallelizer.report.rows.collectives import collective_rows
from parallelizer.report.rows.layers import Layer, axes_of, by_layer, layer_rows
from parallelizer.report.rows.paths import ROOT
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.trace import Trace

BARS = 12
"""More layers than so many get a chart of their own beside the table of folded ones."""

LABELLED = 0.15
"""Part of the width that a stretch of layers needs for its label."""


def section(trace: Trace, sources: Sources) -> Markup:
    """What each layer sends over each axis, and the totals by phase, axis and kind."""
    if not trace.ledger:
        return tag("p", "No collectives: there is only one rank.", class_="quiet")
    layers, axes = by_layer(trace.ledger), axes_of(trace.ledger)
    strip = _strip(layers, axes) if len(layers) > BARS else None
    return join(strip, _folded(layers, axes), _totals(trace.ledger, sources))


def numbers(trace: Trace) -> dict[str, Any]:
    """What the script reads: layers by name, and which of a few patterns each has; by axis bytes up, bytes
    down, and count.
    """
    layers, axes = by_layer(trace.ledger), axes_of(trace.ledger)
    rows = layer_rows(layers)
    row_of = {name: number for number, row in enumerate(rows) for name in row.names}
    sent = [[[row.layer.up[a], row.layer.down[a], row.layer.count[a]] for a in axes] for row in rows]
    which = [row_of[name] for name in layers]
    return {"axes": axes, "names": list(layers), "which": which, "sent": sent}


def _strip(layers: Mapping[str, Layer], axes: Sequence[str]) -> Markup:
    """A bar for each layer, forward above the line and backward below."""
    up = max(1, *(layer.up.total() for layer in layers.values()))
    down = max(1, *(layer.down.total() for layer in layers.values()))
    grid = [
        *(-t for t in ticks(max(up, down), 3) if 0 < t <= down),
        *(t for t in ticks(max(up, down), 3) if t <= up),
    ]
    lines = [
        tag(
            "span",
            tag("b", axis_label(abs(t))),
            class_="tick" if t else "tick ground",
            style=f"bottom:{place:.2f}%",
        )
        for t, place in ((t, 100 * (down + t) / (up + down)) for t in grid)
    ]
    plot = tag(
        "div",
        lines,
        mirrored([Bar(x.up, x.down) for x in layers.values()], axes, up, down),
        tag("span", class_="cursor", hidden=True),
        class_="plot strip",
        role="img",
        aria_label=f"Bytes sent for each of {len(layers)} layers; the table below has the numbers",
    )
    return tag(
        "figure",
        tag("ul", [tag("li", swatch(a), a) for a in axes], class_="legend"),
        plot,
        tag("div", _labels(list(layers)), class_="phases", aria_hidden="true"),
        tag("output", class_="readout quiet", aria_live="polite"),
        tag(
            "figcaption",
            "Sent for each layer, in the order of the forward: above the line in forward, below it in backward.",
        ),
        class_="chart",
        id="layers",
    )


def _labels(names: Sequence[str]) -> list[Markup]:
    """`layers 0–125` under the bars of stretches of numbered layers that are wide enough for it."""
    labels = []
    start = 0
    while start < len(names):
        stem, _, first = names[start].rpartition(".")
        end = start + 1
        while stem and end < len(names) and names[end].rpartition(".")[0] == stem:
            end += 1
        if end - start > LABELLED * len(names):
            text = f"{stem} {first}–{names[end - 1].rpartition('.')[2]}"
            labels.append(tag("span", text, style=edges(start / len(names), end / len(names))))
        start = end
    return labels


def _folded(layers: Mapping[str, Layer], axes: Sequence[str]) -> Markup:
    """Layers that send the same in one row."""
    most = max(1, *(layer.total for layer in layers.values()))
    rows: list[list[Child]] = []
    for row in layer_rows(layers):
        layer = row.layer
        bar = [
            tag("span", class_=css_class(a), style=f"width:{100 * layer.sent(a) / most:.2f}%")
            for a in axes
            if layer.sent(a)
        ]
        paths = [tag("code", glob, class_="path") for glob in row.paths]
        by_axis = [
            [size(layer.sent(a)), tag("span", f"in {layer.count[a]:,}", class_="quiet block")]
            if layer.count[a]
            else ""
            for a in axes
        ]
        rows.append(
            [paths, f"{len(row.names):,}", tag("span", bar, class_="stack"), *by_axis, size(layer.total)]
        )
    return table(
        "Sent for each layer in forward and backward, by axis and in how many collectives; layers that send the same in one row",
        ["layer", "#count", "each sends", *(f"#{a}" for a in axes), "#all axes"],
        rows,
        axes=axes,
    )


def _totals(ledger: Iterable[Collective], sources: Sources) -> Markup:
    rows = []
    for row in collective_rows(ledger):
        issued = "ahead" if row.ahead == row.count else f"{row.ahead:,} ahead" if row.ahead else "blocking"
        rules = sources.links(
            (Span(file, line), f"{key or ROOT}: {n:,} of {row.count:,}")
            for (key, file, line), n in row.rules.most_common()
        )
        rows.append([
            row.phase or "no phase", [swatch(row.axis), tag("code", row.axis)], tag("code", row.kind), f"{row.count:,}",
            size(row.payload_bytes), size(row.wire_bytes), issued, rules or tag("span", "no rule", class_="quiet"),
        ])  # fmt: skip
    return table(
        "Totals; payload is the whole tensor, sent what this rank puts on the wire; fsdp issues ahead of the need",
        ["phase", "axis", "kind", "#count", "#payload", "#sent", "issued", "*rules"],
        rows,
    )
