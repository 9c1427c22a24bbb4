"""One step on a page: the memory over it as an area by kind, and what each layer sends over each axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallelizer.diagnostics import Span
from parallelizer.fold import fold_paths
from parallelizer.plan import AXES
from parallelizer.show import charts
from parallelizer.show.charts import Bar, layer_of
from parallelizer.show.html_table import css_class, table
from parallelizer.show.markup import Markup, join, tag
from parallelizer.show.plan import size
from parallelizer.show.sources import Sources
from parallelizer.simulate.ledger import Entry
from parallelizer.simulate.memory import Point, Usage
from parallelizer.simulate.trace import Trace

KINDS = ("parameters", "optimizer", "gradients", "buffers", "batch", "gathered", "activations", "collectives", "temporaries")
"""From the bottom of the chart: what stays from step to step, then what comes and goes."""

KIND_MEANING = {
    "parameters": "this rank's shards",
    "optimizer": "its states",
    "gradients": "of the shards, after reduction",
    "buffers": "the model's own, such as rotary tables",
    "batch": "what the step is fed",
    "gathered": "parameters that fsdp has put together",
    "activations": "made in forward or loss, kept for backward or on their way",
    "collectives": "buffers that are sent from or received into",
    "temporaries": "made in backward (recomputed activations too), clipping, optimizer",
}

BARS = 12
"""More layers than so many get a chart of their own beside the table of folded ones."""

NOT_COUNTED = "Not counted: the allocator's fragmentation, kernels' workspaces, NCCL's buffers and the CUDA context."


def memory(trace: Trace, hardware: Mapping[str, Any]) -> Markup:
    """The chart with its peak, and as tables what lives at the peak and how high each phase goes."""
    usage = trace.memory
    parts = charts.stretches(usage.course)
    shown = charts.columns(parts)
    kinds = [k for k in KINDS if any(c.point.by_category.get(k) for c in shown)]
    top = max(1, round(usage.peak * 1.02))
    at = next(c for c in shown if c.point.total == usage.peak)
    place = (at.left + at.right) / 2
    label = f"Memory over the step: peak {size(usage.peak)} in {peak_place(usage)}"
    plot = tag(
        "div",
        [tag("span", tag("b", _axis_label(t)), class_="tick", style=f"bottom:{100 * t / top:.2f}%") for t in charts.ticks(top)],
        charts.area(shown, kinds, top),
        tag("span", class_="peak-line", style=f"left:{100 * place:.2f}%;height:{100 * usage.peak / top:.2f}%"),
        tag("span", class_="cursor", hidden=True),
        class_="plot", role="img", aria_label=label,
    )  # fmt: skip
    phases = tag(
        "div",
        [
            tag("span", p.phase, class_="narrow" if p.right - p.left < 0.12 else None,
                style=f"left:{100 * p.left:.2f}%;width:{100 * (p.right - p.left):.2f}%")
            for p in parts
        ],
        class_="phases", aria_hidden="true",
    )  # fmt: skip
    peak = tag(
        "p",
        tag("b", f"Peak {size(usage.peak)}"),
        " ",
        peak_place(usage),
        class_="peak-label end" if place > 0.5 else "peak-label",
        style=f"right:{100 * (1 - place):.2f}%" if place > 0.5 else f"left:{100 * place:.2f}%",
    )
    caption = tag(
        "figcaption",
        "From left to right allocations in their order, not time; short phases are widened. ",
        f"Each of {len(shown)} columns is the fullest of {-(-len(usage.course) // len(shown)):,} moments. "
        if len(shown) < len(usage.course)
        else None,
    )
    return join(
        tag("figure", peak, plot, phases, tag("output", class_="readout", aria_live="polite"), caption, class_="chart", id="course"),
        tag("div", _at_peak(usage, shown, kinds), _by_phase(parts), class_="columns"),
        _capacity(trace, hardware),
    )


def peak_place(usage: Usage) -> str:
    """Where the peak lies: phase and module."""
    return f"{usage.phase or 'between steps'}, {usage.module or '(root)'}"


def fit(trace: Trace, hardware: Mapping[str, Any]) -> str | None:
    """`fits H100-SXM with 70.5 GiB to spare`, if the hardware is known."""
    capacity = hardware.get("memory_gib")
    if not capacity:
        return None
    margin = (int(capacity) << 30) - trace.memory.peak
    name = hardware.get("name") or "the device"
    return f"fits {name}, {size(margin)} to spare" if margin >= 0 else f"does not fit {name}: {size(-margin)} too much"


def _capacity(trace: Trace, hardware: Mapping[str, Any]) -> Markup:
    verdict = fit(trace, hardware)
    return tag("p", tag("b", f"{verdict[0].upper()}{verdict[1:]} of {hardware['memory_gib']} GiB. ") if verdict else None, NOT_COUNTED,
               class_="note")  # fmt: skip


def _at_peak(usage: Usage, shown: Sequence[charts.Column], kinds: Sequence[str]) -> Markup:
    rows = []
    for kind in reversed(kinds):
        held = usage.at_peak.get(kind, 0)
        rows.append([
            [tag("span", class_=f"swatch {kind}"), kind],
            [tag("span", size(held), class_="held"), _share(held, usage.peak, kind)],
            size(max(c.point.by_category[kind] for c in shown)),
            tag("span", KIND_MEANING[kind], class_="quiet"),
        ])
    rows.append(["all", tag("span", size(usage.peak), class_="held"), size(usage.peak), ""])
    return table("What lives at the peak, and the most of it in any column", ["kind", "#at peak", "#most", "what it is"], rows, cards=False)


def _share(held: int, whole: int, kind: str) -> Markup:
    return tag("span", tag("span", class_=kind, style=f"width:{100 * held / max(whole, 1):.1f}%"), class_="share")


def _by_phase(parts: Sequence[charts.Stretch]) -> Markup:
    """Phases that come again, with every part of a batch, together."""
    highest: dict[str, Point] = {}
    for part in parts:
        top = max(part.points, key=lambda p: p.total)
        if part.phase not in highest or top.total > highest[part.phase].total:
            highest[part.phase] = top
    rows = [[phase or "between steps", size(p.total), tag("code", p.module or "(root)")] for phase, p in highest.items()]
    return table("How high each phase goes", ["phase", "#highest", "in"], rows, cards=False)


@dataclass
class _Sum:
    """What some collectives have in common and add up to."""

    count: int = 0
    payload: int = 0
    sent: int = 0
    overlapped: int = 0
    rules: Counter[tuple[str, Span]] = field(default_factory=Counter)

    def add(self, entry: Entry) -> None:
        self.count += 1
        self.payload += entry.payload_bytes
        self.sent += entry.wire_bytes
        self.overlapped += entry.overlapped
        if entry.rule:
            self.rules[entry.rule[0], Span(entry.rule[1], entry.rule[2])] += 1


def communication(trace: Trace, sources: Sources) -> Markup:
    """What each layer sends over each axis, and the totals by phase, axis and kind."""
    if not trace.ledger:
        return tag("p", "No collectives: one rank talks to nobody.", class_="quiet")
    layers = by_layer(trace.ledger)
    axes = axes_of(trace.ledger)
    return join(
        _strip(list(layers), list(layers.values()), axes) if len(layers) > BARS else None,
        _folded(layers, axes),
        _totals(trace.ledger, sources),
    )


def axes_of(ledger: Iterable[Entry]) -> list[str]:
    """The axes that something is sent over, innermost first."""
    names = {e.axis for e in ledger}
    return sorted(names, key=lambda a: (-AXES.index(a.split("+")[0]) if a.split("+")[0] in AXES else 1, a))


@dataclass(frozen=True)
class Layer:
    """What one layer sends: bytes in forward and in backward, and the number of collectives, by axis."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)

    def key(self) -> tuple[object, ...]:
        """Equal for layers that send the same."""
        return tuple(tuple(sorted(c.items())) for c in (self.up, self.down, self.count))


def by_layer(ledger: Iterable[Entry]) -> dict[str, Layer]:
    """What each layer sends, in order of first appearance. Forward includes the loss; clipping counts as backward."""
    layers: dict[str, Layer] = {}
    for entry in ledger:
        layer = layers.setdefault(layer_of(entry.module), Layer())
        (layer.up if entry.phase in ("forward", "loss") else layer.down)[entry.axis] += entry.wire_bytes
        layer.count[entry.axis] += 1
    return layers


def _strip(names: Sequence[str], layers: Sequence[Layer], axes: Sequence[str]) -> Markup:
    up, down = (max((sum(side.values()) for side in sides), default=0) for sides in
                ([x.up for x in layers], [x.down for x in layers]))  # fmt: skip
    up, down = max(up, 1), max(down, 1)
    ground = 100 * down / (up + down)
    step = charts.ticks(max(up, down), 3)[1] if max(up, down) > 1 else 1
    heights = [sign * step * n for sign, bound in ((1, up), (-1, down)) for n in range(sign < 0, bound // step + 1)]
    plot = tag(
        "div",
        [tag("span", tag("b", _axis_label(abs(h))), class_="tick" if h else "tick ground",
             style=f"bottom:{ground + 100 * h / (up + down):.2f}%") for h in heights],
        charts.mirrored([Bar(x.up, x.down) for x in layers], axes, up, down),
        tag("span", class_="cursor", hidden=True),
        tag("span", "forward", class_="side above"),
        tag("span", "backward", class_="side below"),
        class_="plot strip", role="img",
        aria_label=f"Bytes sent by each of {len(layers)} layers, forward above and backward below the line; the table has the numbers",
    )  # fmt: skip
    return tag(
        "figure",
        _legend(axes),
        plot,
        tag("div", _runs(names), class_="phases", aria_hidden="true"),
        tag("output", class_="readout", aria_live="polite"),
        tag("figcaption", "What this rank sends for each layer, in the order of the forward."),
        class_="chart",
        id="layers",
    )


def _runs(names: Sequence[str]) -> list[Markup]:
    """Labels under the bars: stretches of numbered layers that are wide enough for one."""
    labels = []
    start = 0
    while start < len(names):
        stem = names[start].rpartition(".")[0]
        end = start + 1
        while stem and end < len(names) and names[end].rpartition(".")[0] == stem:
            end += 1
        if (end - start) / len(names) > 0.15:
            first, last = (names[i].rpartition(".")[2] for i in (start, end - 1))
            labels.append(tag("span", f"{stem} {first}–{last}",
                              style=f"left:{100 * start / len(names):.2f}%;width:{100 * (end - start) / len(names):.2f}%"))  # fmt: skip
        start = end
    return labels


def _legend(axes: Sequence[str]) -> Markup:
    return tag("ul", [tag("li", tag("span", class_=f"swatch {css_class(a)}"), a) for a in axes], class_="legend")


def _folded(layers: Mapping[str, Layer], axes: Sequence[str]) -> Markup:
    """Layers that send the same in one row."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(layer.key(), []).append(name)
    most = max(sum(x.up.values()) + sum(x.down.values()) for x in layers.values()) or 1
    rows = []
    for names in groups.values():
        layer = layers[names[0]]
        sent = {a: layer.up[a] + layer.down[a] for a in axes}
        rows.append([
            [tag("code", glob or "(root)", class_="path") for glob in fold_paths(names)],
            f"{len(names):,}",
            tag("span", [tag("span", class_=css_class(a), style=f"width:{100 * sent[a] / most:.2f}%") for a in axes if sent[a]],
                class_="stack"),
            *([size(sent[a]), tag("span", f"in {layer.count[a]:,}", class_="quiet block")] if layer.count[a] else "" for a in axes),
            size(sum(sent.values())),
        ])  # fmt: skip
    return table(
        "Sent for each layer in forward and backward, by axis and in how many collectives; layers that send the same in one row",
        ["layer", "#count", "each sends", *(f"#{a}" for a in axes), "#all axes"],
        rows,
        axes=axes,
    )


def _totals(ledger: Iterable[Entry], sources: Sources) -> Markup:
    sums: dict[tuple[str, str, str], _Sum] = {}
    for entry in ledger:
        sums.setdefault((entry.phase, entry.axis, entry.kind), _Sum()).add(entry)
    rows = [
        [
            phase,
            [tag("span", class_=f"swatch {css_class(axis)}"), tag("code", axis)],
            tag("code", kind),
            f"{s.count:,}",
            size(s.payload),
            size(s.sent),
            "ahead" if s.overlapped == s.count else f"{s.overlapped:,} ahead" if s.overlapped else "blocking",
            sources.links((span, f"{key or '(root)'}: {n:,} of {s.count:,}") for (key, span), n in s.rules.most_common())
            or tag("span", "no rule", class_="quiet"),
        ]
        for (phase, axis, kind), s in sums.items()
    ]
    return table(
        "Totals; payload is the whole tensor, sent what this rank puts on the wire; fsdp issues ahead of the need",
        ["phase", "axis", "kind", "#count", "#payload", "#sent", "issued", "rules"],
        rows,
    )


def numbers(trace: Trace) -> dict[str, Any]:
    """What the script reads: the columns of both charts."""
    shown = charts.columns(charts.stretches(trace.memory.course))
    phases, modules = ({n: i for i, n in enumerate(dict.fromkeys(names))} for names in
                       ([c.point.phase for c in shown], [c.point.module for c in shown]))  # fmt: skip
    layers, axes = by_layer(trace.ledger), axes_of(trace.ledger)
    kinds: dict[tuple[object, ...], int] = {}
    which = [kinds.setdefault(layer.key(), len(kinds)) for layer in layers.values()]
    first = {n: layer for layer, n in zip(reversed(list(layers.values())), reversed(which), strict=True)}
    return {
        "course": {
            "kinds": KINDS,
            "phases": list(phases),
            "modules": list(modules),
            "rows": [
                [round(c.left, 5), phases[c.point.phase], modules[c.point.module], *(c.point.by_category.get(k, 0) for k in KINDS)]
                for c in shown
            ],
        },
        "layers": {
            "axes": axes,
            "names": list(layers),
            "which": which,
            "sent": [[[first[n].up[a], first[n].down[a], first[n].count[a]] for a in axes] for n in range(len(kinds))],
        },
    }


def _axis_label(count: float) -> str:
    """A round number of bytes, as short as it goes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:g} {unit}" if count else "0"
        count /= 1024
    return f"{count:g} TiB"
