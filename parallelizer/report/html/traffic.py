"""What one rank sends in a step, on a page: for each layer over each axis, and in total by phase, axis and
kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.units import size
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import AXES
from parallelizer.report.html.charts import Bar, axis_label, edges, layer_of, mirrored, ticks
from parallelizer.report.html.markup import Child, Markup, join, tag
from parallelizer.report.html.sources import Sources
from parallelizer.report.html.table import css_class, swatch, table
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.trace import Trace

BARS = 12
"""More layers than so many get a chart of their own beside the table of folded ones."""

LABELLED = 0.15
"""Part of the width that a stretch of layers needs for its label."""


@dataclass(frozen=True)
class Layer:
    """What one layer sends: bytes in forward and in backward, and the number of collectives, by axis."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)

    def key(self) -> tuple[object, ...]:
        """Equal for layers that send the same."""
        return tuple(tuple(sorted(c.items())) for c in (self.up, self.down, self.count))


@dataclass
class _Sum:
    """What some collectives add up to. `rules` counts them by key and place."""

    count: int = 0
    payload: int = 0
    sent: int = 0
    overlapped: int = 0
    rules: Counter[tuple[str, Span]] = field(default_factory=Counter)


def section(trace: Trace, sources: Sources) -> Markup:
    """What each layer sends over each axis, and the totals by phase, axis and kind."""
    if not trace.ledger:
        return tag("p", "No collectives: one rank talks to nobody.", class_="quiet")
    layers, axes = by_layer(trace.ledger), axes_of(trace.ledger)
    strip = _strip(layers, axes) if len(layers) > BARS else None
    return join(strip, _folded(layers, axes), _totals(trace.ledger, sources))


def axes_of(ledger: Iterable[Collective]) -> list[str]:
    """The axes that something is sent over, innermost first; one that is no axis of the mesh last."""

    def depth(axis: str) -> int:
        first = axis.partition("+")[0]
        return AXES.index(first) if first in AXES else -1

    return sorted({e.axis for e in ledger}, key=lambda axis: (-depth(axis), axis))


def by_layer(ledger: Iterable[Collective]) -> dict[str, Layer]:
    """What each layer sends, in order of first appearance. Forward includes the loss, backward all that
    follows.
    """
    layers: dict[str, Layer] = {}
    for entry in ledger:
        layer = layers.setdefault(layer_of(entry.module), Layer())
        (layer.up if entry.phase in ("forward", "loss") else layer.down)[entry.axis] += entry.wire_bytes
        layer.count[entry.axis] += 1
    return layers


def numbers(trace: Trace) -> dict[str, Any]:
    """What the script reads: layers by name, and which of a few patterns each has; by axis bytes up, bytes
    down, and count.
    """
    layers, axes = by_layer(trace.ledger), axes_of(trace.ledger)
    patterns: dict[tuple[object, ...], int] = {}
    sent: list[list[list[int]]] = []
    which = []
    for layer in layers.values():
        number = patterns.setdefault(layer.key(), len(patterns))
        if number == len(sent):
            sent.append([[layer.up[a], layer.down[a], layer.count[a]] for a in axes])
        which.append(number)
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
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(layer.key(), []).append(name)
    most = max(1, *(layer.up.total() + layer.down.total() for layer in layers.values()))
    rows: list[list[Child]] = []
    for names in groups.values():
        layer = layers[names[0]]
        sent = {a: layer.up[a] + layer.down[a] for a in axes}
        bar = [
            tag("span", class_=css_class(a), style=f"width:{100 * sent[a] / most:.2f}%")
            for a in axes
            if sent[a]
        ]
        paths = [tag("code", glob or "(root)", class_="path") for glob in fold_paths(names)]
        by_axis = [
            [size(sent[a]), tag("span", f"in {layer.count[a]:,}", class_="quiet block")]
            if layer.count[a]
            else ""
            for a in axes
        ]
        rows.append(
            [paths, f"{len(names):,}", tag("span", bar, class_="stack"), *by_axis, size(sum(sent.values()))]
        )
    return table(
        "Sent for each layer in forward and backward, by axis and in how many collectives; layers that send the same in one row",
        ["layer", "#count", "each sends", *(f"#{a}" for a in axes), "#all axes"],
        rows,
        axes=axes,
    )


def _totals(ledger: Iterable[Collective], sources: Sources) -> Markup:
    sums: dict[tuple[str, str, str], _Sum] = {}
    for e in ledger:
        s = sums.setdefault((e.phase, e.axis, e.kind), _Sum())
        s.count, s.overlapped = s.count + 1, s.overlapped + e.overlapped
        s.payload, s.sent = s.payload + e.payload_bytes, s.sent + e.wire_bytes
        if e.rule:
            s.rules[e.rule[0], Span(e.rule[1], e.rule[2])] += 1
    rows = []
    for (phase, axis, kind), s in sums.items():
        issued = (
            "ahead" if s.overlapped == s.count else f"{s.overlapped:,} ahead" if s.overlapped else "blocking"
        )
        rules = sources.links(
            (at, f"{key or '(root)'}: {n:,} of {s.count:,}") for (key, at), n in s.rules.most_common()
        )
        rows.append([
            phase or "no phase", [swatch(axis), tag("code", axis)], tag("code", kind), f"{s.count:,}", size(s.payload),
            size(s.sent), issued, rules or tag("span", "no rule", class_="quiet"),
        ])  # fmt: skip
    return table(
        "Totals; payload is the whole tensor, sent what this rank puts on the wire; fsdp issues ahead of the need",
        ["phase", "axis", "kind", "#count", "#payload", "#sent", "issued", "*rules"],
        rows,
    )
