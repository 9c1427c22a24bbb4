"""The memory of one step on a page: an area over the step by kind, what lives at its peak, and how high each
phase goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallelizer.diagnostics.units import size
from parallelizer.report.capacity import NOT_COUNTED, capacity
from parallelizer.report.html.charts import (
    ChartColumn,
    Stretch,
    area,
    axis_label,
    columns,
    edges,
    stretches,
    ticks,
)
from parallelizer.report.html.markup import Markup, join, tag
from parallelizer.report.html.table import table
from parallelizer.report.rows.memory import highest_by_phase, memory_rows
from parallelizer.report.rows.paths import ROOT
from parallelizer.simulate.record.memory import CATEGORIES, Usage
from parallelizer.simulate.record.trace import Trace

MEANING = {
    "parameters": "this rank's shards",
    "optimizer": "its states",
    "gradients": "of the shards, after reduction",
    "unsharded": "gradients of whole parameters, which fsdp keeps until the last microbatch",
    "buffers": "the model's own, such as rotary tables",
    "batch": "what the step is fed",
    "gathered": "parameters that fsdp has put together",
    "activations": "made in forward or loss, kept for backward or on their way",
    "collectives": "buffers that are sent from or received into",
    "received": "activations and gradients from other stages",
    "temporaries": "made in backward (recomputed activations too), clipping, optimizer",
}
"""From the bottom of the chart: what stays from step to step, then what comes and goes."""

KINDS = (*MEANING, *(c for c in CATEGORIES if c not in MEANING))


def section(trace: Trace, hardware: Mapping[str, Any]) -> Markup:
    """The chart with its peak, and as tables what lives at the peak and how high each phase goes."""
    usage = trace.memory
    parts = stretches(usage.course)
    shown = columns(parts)
    kinds = [k for k in KINDS if any(c.point.by_category.get(k) for c in shown)]
    verdict = capacity(trace, hardware)
    return join(
        _chart(usage, parts, shown, kinds),
        tag("div", _at_peak(usage, shown, kinds), _by_phase(parts), class_="columns"),
        tag(
            "p",
            tag("b", f"{verdict}. ") if verdict else None,
            NOT_COUNTED,
            class_="remark",
        ),
    )


def peak_place(usage: Usage) -> str:
    """Where the peak lies: phase and module."""
    return f"{usage.phase or 'between phases'}, {usage.module or ROOT}"


def numbers(trace: Trace) -> dict[str, Any]:
    """What the script reads of the columns: left edge, phase and module by number, and bytes by kind."""
    shown = columns(stretches(trace.memory.course))
    phases = {name: i for i, name in enumerate(dict.fromkeys(c.point.phase for c in shown))}
    modules = {name: i for i, name in enumerate(dict.fromkeys(c.point.module for c in shown))}
    rows = [
        [
            round(c.left, 5),
            phases[c.point.phase],
            modules[c.point.module],
            *(c.point.by_category.get(k, 0) for k in KINDS),
        ]
        for c in shown
    ]
    return {"kinds": KINDS, "phases": list(phases), "modules": list(modules), "rows": rows}


def _chart(
    usage: Usage, parts: Sequence[Stretch], shown: Sequence[ChartColumn], kinds: Sequence[str]
) -> Markup:
    top = max(1, round(usage.peak * 1.02))
    at = next(c for c in shown if c.point.total == usage.peak)
    place = 50 * (at.left + at.right)
    plot = tag(
        "div",
        [
            tag("span", tag("b", axis_label(t)), class_="tick", style=f"bottom:{100 * t / top:.2f}%")
            for t in ticks(top)
        ],
        area(shown, kinds, top),
        tag("span", class_="peak-line", style=f"left:{place:.2f}%;height:{100 * usage.peak / top:.2f}%"),
        tag("span", class_="cursor", hidden=True),
        class_="plot",
        role="img",
        aria_label=f"Memory over the step: peak {size(usage.peak)} in {peak_place(usage)}",
    )
    phases = [
        tag(
            "span",
            p.phase,
            class_="narrow" if p.right - p.left < 0.12 else None,
            style=edges(p.left, p.right),
        )
        for p in parts
    ]
    late = place > 50
    beside = (
        f"right:{100 - place:.2f}%;max-width:{place:.2f}%"
        if late
        else f"left:{place:.2f}%;max-width:{100 - place:.2f}%"
    )
    peak = tag(
        "p",
        tag("b", f"Peak {size(usage.peak)}"),
        f" {peak_place(usage)}",
        class_="peak-label end" if late else "peak-label",
        style=beside,
    )
    moments = -(-len(usage.course) // len(shown))
    caption = (
        "From left to right allocations in their order, not time; short phases are widened.",
        f" Each of {len(shown)} columns is the fullest of {moments:,} moments or so."
        if moments > 1
        else None,
    )
    return tag(
        "figure",
        peak,
        plot,
        tag("div", phases, class_="phases", aria_hidden="true"),
        tag("ul", [tag("li", tag("span", class_=f"swatch {k}"), k) for k in kinds], class_="legend"),
        tag("output", class_="readout quiet", aria_live="polite"),
        tag("figcaption", caption),
        class_="chart",
        id="course",
    )


def _at_peak(usage: Usage, shown: Sequence[ChartColumn], kinds: Sequence[str]) -> Markup:
    rows = []
    for row in memory_rows(usage, reversed(kinds), [c.point for c in shown]):
        width = f"width:{100 * row.held / max(usage.peak, 1):.1f}%"
        rows.append([
            [tag("span", class_=f"swatch {row.kind}"), row.kind],
            [size(row.held), tag("span", tag("span", class_=row.kind, style=width), class_="share")],
            size(row.most),
            tag("span", MEANING.get(row.kind, ""), class_="quiet"),
        ])  # fmt: skip
    rows.append(["all", [size(usage.peak)], size(usage.peak), Markup()])
    heads = ["kind", "#at peak", "#most", "*what it is"]
    return table("What lives at the peak, and the most of it in any column", heads, rows)


def _by_phase(parts: Sequence[Stretch]) -> Markup:
    highest = highest_by_phase((part.phase, part.points) for part in parts)
    rows = [
        [phase or "no phase", size(p.total), tag("code", p.module or ROOT)] for phase, p in highest.items()
    ]
    return table("How high each phase goes", ["phase", "#highest", "in"], rows, cards=False)
