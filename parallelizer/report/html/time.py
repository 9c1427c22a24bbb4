"""The time line of a step and of a layer on a page: a lane for the computation, and one for the collectives of each axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from parallelizer.report.html import schedule
from parallelizer.report.html.markup import Markup, join, tag
from parallelizer.report.html.table import css_class, table
from parallelizer.report.rows.time import compute_shares, costliest_modules, duration, range_of, wait_shares
from parallelizer.simulate.time.predict import StepTime
from parallelizer.simulate.time.replay import COMPUTE, WAIT, TimeSpan

WIDTH, LANE = 6000, 100
BINS = 600
"""Columns of a time line; what is shorter is drawn as the share of a column."""

LEGEND = (("parameters", "GEMMs"), ("activations", "attention"), ("temporaries", "elementwise"))
"""The colours of the computation, which are those of kinds of memory."""


def section(time: StepTime) -> Markup:
    """The step's length and range, the schedule of a pipeline, time lines of the step and of a layer in forward and in backward,
    and where the time goes.
    """
    spans = [span for span in time.spans if span.queue != WAIT]
    layer = _middle_layer(spans)
    # Of many accumulated parts a pipeline's step has the first ones and the optimizer.
    whole = max((span.end for span in spans), default=0.0) if time.schedule else time.seconds
    windows = [("The step", 0.0, whole)]
    for phase in ("forward", "backward"):
        inside = [
            s for s in spans if layer and s.queue == COMPUTE and s.phase == phase and _in(s.module, layer)
        ]
        if inside:
            windows.append((f"{layer} in {phase}", inside[0].start, _end_of_turn(inside)))
    mfu = f", {time.mfu:.0%} MFU" if time.mfu is not None else ""
    rate = f"{time.tokens_per_second:,.0f} tokens/s a device"
    summary = f"{duration(time.seconds)} a step ({range_of(time)}) on {time.machine}{mfu}, {rate}"
    shares = [(share.name, share) for share in compute_shares(time)]
    shares += [(f"waiting for {share.name}", share) for share in wait_shares(time)]
    rows = [[name, duration(share.seconds), f"{share.share:.1%}"] for name, share in shares]
    modules = [
        [tag("code", s.name), duration(s.seconds), f"{s.share:.1%}"] for s in costliest_modules(time, 12)
    ]
    return join(
        tag("p", summary, class_="lead"),
        tag(
            "ul",
            [tag("li", tag("span", class_=f"swatch {colour}"), name) for colour, name in LEGEND],
            class_="legend",
        ),
        tag("div", schedule.timeline(time.schedule), class_="scroll") if time.schedule else None,
        [_time_line(title, spans, low, high) for title, low, high in windows],
        tag(
            "div",
            table("Where the time goes", ["what", "#time", "#share"], rows, cards=False),
            table("The costliest modules", ["module", "#time", "#share"], modules, cards=False),
            class_="columns",
        ),
        tag(
            "p",
            "Darker: computed a second time for a checkpoint. Gaps in the lane of the computation are waiting.",
            class_="remark",
        ),
    )


def _in(module: str, layer: str) -> bool:
    return module == layer or module.startswith(f"{layer}.")


def _middle_layer(spans: Sequence[TimeSpan]) -> str | None:
    """A layer in the middle of the longest run of numbered modules."""
    names = dict.fromkeys(found[0] for s in spans if (found := re.match(r"(?:.*?\.)?\d+(?=\.|$)", s.module)))
    runs: dict[str, list[str]] = {}
    for name in names:
        runs.setdefault(name.rpartition(".")[0], []).append(name)
    if not runs:
        return None
    longest = max(len(run) for run in runs.values())
    run = next(run for run in runs.values() if len(run) == longest)
    return sorted(run, key=lambda name: int(name.rpartition(".")[2]))[longest // 2]


def _end_of_turn(inside: Sequence[TimeSpan]) -> float:
    """The end of the first visit to a layer: an accumulated batch comes again later."""
    end = inside[0].end
    longest = max(span.seconds for span in inside)
    for span in inside:
        if span.start > end + 20 * longest:
            break
        end = max(end, span.end)
    return end


def _time_line(title: str, spans: Sequence[TimeSpan], low: float, high: float) -> Markup:
    shown = [s for s in spans if s.end > low and s.start < high and s.end > s.start]
    lanes = [COMPUTE, *dict.fromkeys(s.queue for s in shown if s.queue != COMPUTE)]
    labels = [tag("span", lane, style=f"height:{100 / len(lanes):.2f}%") for lane in lanes]
    paths = [
        path
        for place, lane in enumerate(lanes)
        for path in _lane([s for s in shown if s.queue == lane], place * LANE, low, high)
    ]
    plot = tag(
        "svg",
        paths,
        viewBox=f"0 0 {WIDTH} {LANE * len(lanes)}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}: {duration(high - low)}",
    )
    return tag(
        "figure",
        tag("figcaption", tag("b", title), f", {duration(high - low)}"),
        tag(
            "div",
            tag("div", labels, class_="lanes"),
            tag("div", plot, class_="lane-plot"),
            class_="time-line",
            style=f"height:{2 * len(lanes)}rem",
        ),
        class_="chart",
    )


def _lane(spans: Iterable[TimeSpan], top: int, low: float, high: float) -> list[Markup]:
    """A path for each colour: every span as a box, or, where there are more than columns, each column filled by its share."""
    listed = list(spans)
    by_class: dict[str, list[tuple[float, float, float]]] = {}
    scale = WIDTH / (high - low)
    if len(listed) <= BINS:
        for span in listed:
            edges = (max(span.start, low) - low) * scale, (min(span.end, high) - low) * scale
            by_class.setdefault(_class(span), []).append((*edges, 1.0))
    else:
        for name, filled in _binned(listed, low, high).items():
            by_class[name] = [
                (i * WIDTH / BINS, (i + 1) * WIDTH / BINS, share) for i, share in filled.items()
            ]
    paths = []
    base: dict[int, float] = {}
    for name, boxes in by_class.items():
        pieces = []
        for left, right, share in boxes:
            under = base.get(round(left), 0.0) if share < 1.0 else 0.0
            base[round(left)] = under + share
            bottom = top + LANE - 8 - (LANE - 16) * min(under, 1.0)
            height = (LANE - 16) * min(share, 1.0 - min(under, 1.0))
            if height > 0.5:
                pieces.append(
                    f"M{left:.0f} {bottom:.0f}H{max(right, left + 1):.0f}V{bottom - height:.0f}H{left:.0f}Z"
                )
        if pieces:
            paths.append(tag("path", d="".join(pieces), class_=name))
    return paths


def _binned(spans: Iterable[TimeSpan], low: float, high: float) -> dict[str, dict[int, float]]:
    width = (high - low) / BINS
    found: dict[str, dict[int, float]] = {}
    for span in spans:
        bins = found.setdefault(_class(span), {})
        at, end = max(span.start, low), min(span.end, high)
        first, last = int((at - low) / width), min(int((end - low) / width), BINS - 1)
        for i in range(first, last + 1):
            left, right = low + i * width, low + (i + 1) * width
            bins[i] = bins.get(i, 0.0) + max(0.0, min(end, right) - max(at, left)) / width
    return found


def _class(span: TimeSpan) -> str:
    if span.queue == COMPUTE:
        return f"span {span.kind}{' again' if span.again else ''}"
    return f"axis {css_class(span.axis)}"
