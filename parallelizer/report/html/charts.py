"""Charts drawn as SVG that stretches with the page: lengths are parts of the plot, and every label is HTML
beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parallelizer.report.html.markup import Markup, tag
from parallelizer.report.html.table import css_class
from parallelizer.report.rows.layers import layer_of
from parallelizer.report.rows.memory import phase_runs
from parallelizer.simulate.record.memory import Point

WIDTH, HEIGHT = 6000, 1000
"""Units of a plot: drawn with whole numbers, which keeps the file small."""

COLUMNS = 600
HAIRLINES = 48
"""More bars than so many are kept apart by a line one pixel wide, whatever the page's width."""

NARROWEST = 0.06
"""Part of the width that the shortest phase gets: of 70,000 changes the optimizer may make ten."""


@dataclass(frozen=True)
class ChartColumn:
    """A stretch of the course, from `left` to `right` in parts of the width, and its fullest moment."""

    left: float
    right: float
    point: Point


@dataclass(frozen=True)
class Stretch:
    """One phase's part of the course: its points and its part of the width."""

    phase: str
    left: float
    right: float
    points: Sequence[Point]


def stretches(course: Sequence[Point]) -> list[Stretch]:
    """The phases of a course in order, as `phase_runs` tells them apart.

    Widths are in proportion to the number of points, with a least one.
    """
    runs = phase_runs(course)
    least = min(NARROWEST, 0.5 / len(runs))
    shares = [len(points) / len(course) for _, points in runs]
    room = 1 - least * sum(share < least for share in shares)
    wide = sum(share for share in shares if share >= least)
    ends = list(itertools.accumulate(share / wide * room if share >= least else least for share in shares))
    return [
        Stretch(phase, left, right, points)
        for (phase, points), left, right in zip(runs, [0.0, *ends], ends, strict=False)
    ]


def columns(parts: Sequence[Stretch], limit: int = COLUMNS) -> list[ChartColumn]:
    """About `limit` columns. Each stands for its fullest moment, so that no maximum is lost or blurred.

    Columns end where a layer ends: equal layers look equal, instead of beating against columns that cut them
    anywhere.
    """
    found = []
    for part in parts:
        wanted = max(1, round(limit * (part.right - part.left)))
        runs = [list(group) for _, group in itertools.groupby(part.points, lambda p: layer_of(p.module))]
        if len(runs) > wanted:
            runs = [list(part.points)]
        step = (part.right - part.left) / len(part.points)
        at = 0
        for run in runs:
            count = min(len(run), math.ceil(wanted * len(run) / len(part.points)))
            cuts = [i * len(run) // count for i in range(count + 1)]
            for a, b in itertools.pairwise(cuts):
                fullest = max(run[a:b], key=lambda p: p.total)
                found.append(ChartColumn(part.left + step * (at + a), part.left + step * (at + b), fullest))
            at += len(run)
    return found


def area(shown: Sequence[ChartColumn], kinds: Sequence[str], top: int) -> Markup:
    """Columns stacked by kind, the first kind lowest, up to `top` bytes. Decoration: what it shows is said
    beside it.
    """
    paths = []
    for count in range(len(kinds), 0, -1):
        below = kinds[:count]
        heights = [sum(c.point.by_category.get(k, 0) for k in below) for c in shown]
        paths.append(tag("path", d=_steps(shown, heights, top), class_=f"kind {kinds[count - 1]}"))
    return _svg(paths)


def _steps(shown: Sequence[ChartColumn], heights: Sequence[int], top: int) -> str:
    """The outline of a staircase over the ground line."""
    parts = [f"M0 {HEIGHT}"]
    last = HEIGHT
    for column, height in zip(shown, heights, strict=True):
        y = HEIGHT - round(height * HEIGHT / top)
        if y != last:
            parts.append(f"H{round(column.left * WIDTH)}V{y}")
            last = y
    return "".join([*parts, f"H{WIDTH}V{HEIGHT}Z"])


@dataclass(frozen=True)
class Bar:
    """What one layer sends, in bytes by axis: `up` in forward, `down` in backward."""

    up: Mapping[str, int]
    down: Mapping[str, int]


def mirrored(bars: Sequence[Bar], axes: Sequence[str], up: int, down: int) -> Markup:
    """A bar for each layer, forward above the ground line and backward below it, stacked by axis.

    `up` and `down` are the bytes at the plot's upper and lower edge.
    """
    slot = WIDTH / len(bars)
    gap = 0.12 if len(bars) <= HAIRLINES else 0.0
    ground, scale = HEIGHT * up / (up + down), HEIGHT / (up + down)
    paths = []
    for index, axis in enumerate(axes):
        pieces = []
        for i, bar in enumerate(bars):
            left, right = round((i + gap) * slot), round((i + 1 - gap) * slot)
            for sent, sign in ((bar.up, -1), (bar.down, 1)):
                start = ground + sign * scale * sum(sent.get(a, 0) for a in axes[:index])
                end = start + sign * scale * sent.get(axis, 0)
                if round(start) != round(end):
                    pieces.append(f"M{left} {round(start)}H{right}V{round(end)}H{left}Z")
        if pieces:
            paths.append(tag("path", d="".join(pieces), class_=f"axis {css_class(axis)}"))
    if gap == 0:
        lines = "".join(f"M{round(i * slot)} 0V{HEIGHT}" for i in range(1, len(bars)))
        paths.append(tag("path", d=lines, class_="hair"))
    return _svg(paths)


def _svg(paths: Iterable[Markup]) -> Markup:
    return tag(
        "svg",
        paths,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )


def ticks(top: int, most: int = 5) -> list[int]:
    """Numbers of bytes that are round in powers of two from 0 up to `top`, at most `most` above 0."""
    steps = (n * 1024**power for power in range(6) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    step = next((s for s in steps if top // s <= most), max(top, 1))
    return list(range(0, top + 1, step))


def axis_label(count: float) -> str:
    """A round number of bytes, as short as it goes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:g} {unit}" if count else "0"
        count /= 1024
    return f"{count:g} TiB"


def edges(left: float, right: float) -> str:
    """The style that puts a label between two parts of the width."""
    return f"left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%"
