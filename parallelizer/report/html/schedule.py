"""The timeline of a pipeline schedule as SVG: a row for each rank, a block for each action, and the background where the
rank waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallelizer.language.pipeline.actions import ActionKind
from parallelizer.language.pipeline.replay import Replay, TimedAction
from parallelizer.report.html.markup import Markup, join, tag
from parallelizer.report.html.table import table
from parallelizer.report.rows.schedules import ScheduleRow
from parallelizer.report.text.schedule import cells

ROW, BAR = 24, 20
"""The height of a rank's row and of the blocks in it, in pixels."""

LABEL = 58
"""The width of the ranks' labels."""

WIDTHS = 600, 3000
"""The least and the greatest width of the blocks. Between them the shortest action is `SHORTEST` wide."""

SHORTEST = 18
DIGIT = 7
"""The width of a digit; a block that is narrower than its number and 3 pixels has none."""

LIGHTER = 0.3
"""How much lighter the last stage of a rank is than its first."""

COLOURS: Mapping[ActionKind, tuple[str, str]] = {
    ActionKind.FORWARD: ("#4877a8", "forward"),
    ActionKind.BACKWARD: ("#2f8f7d", "backward"),
    ActionKind.BACKWARD_INPUT: ("#58ad9b", "backward for inputs"),
    ActionKind.BACKWARD_WEIGHT: ("#d0922b", "backward for weights"),
}
"""The colour of each kind, which white digits can be read on, and its name. They fit light pages and dark ones."""

STYLE = (
    '.schedule text{font:12px system-ui,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;fill:currentColor}'
    ".schedule .number{fill:#fff;text-anchor:middle;font-size:11px}"
    ".schedule .wait{fill:currentColor;opacity:.09}"
)


def section(found: Replay, rows: Sequence[ScheduleRow]) -> Markup:
    """The timeline, which scrolls where it is wider than the page, and the schedules side by side."""
    heads = ("schedule", "#stages a rank", "#bubble", "#live microbatches")
    caption = "All schedules, if every stage takes the same time and messages take none"
    return join(
        tag("div", timeline(found), class_="scroll"),
        table(caption, heads, [cells(row) for row in rows if row.misfit is None]),
        [tag("p", f"{row.misfit}.", class_="remark") for row in rows if row.misfit],
    )


def timeline(found: Replay, scale: float | None = None, **attributes: str) -> Markup:
    """One step. Widths are in proportion to durations; the stages of a rank after its first have lighter colours.

    `scale` is the number of pixels for a unit of time; without it the shortest action is just wide enough for a number.
    `attributes` are added to the SVG element.
    """
    scale = scale or _scale(found)
    width, height = LABEL + round(found.length * scale) + 1, ROW * len(found.ranks)
    stages = [sorted({one.action.stage for one in rank}) for rank in found.ranks]
    parts = [tag("style", Markup(STYLE))]
    for rank, actions in enumerate(found.ranks):
        top = rank * ROW
        parts.append(tag("text", f"rank {rank}", x=0, y=top + 15))
        parts.append(tag("rect", class_="wait", x=LABEL, y=top, width=width - LABEL, height=BAR))
        for one in actions:
            at = stages[rank].index(one.action.stage)
            opacity = 1 - LIGHTER * at / max(1, len(stages[rank]) - 1)
            parts += _block(one, top, scale, opacity)
    legend, below = _legend(found, height)
    title = tag(
        "title", f"Timeline of {len(found.ranks)} ranks; they wait {100 * found.bubble:.1f} % of the time"
    )
    size: dict[str, str | int] = {
        "viewBox": f"0 0 {width} {height + below}",
        "width": width,
        "height": height + below,
    }
    return tag("svg", title, parts, legend, class_="schedule", role="img", **size, **attributes)


def _scale(found: Replay) -> float:
    """Pixels for a unit of time."""
    shortest = min((d for rank in found.ranks for one in rank if (d := one.end - one.start) > 0), default=1.0)
    least, most = (width / found.length if found.length else 1.0 for width in WIDTHS)
    return min(max(SHORTEST / shortest, least), most)


def _block(one: TimedAction, top: int, scale: float, opacity: float) -> list[Markup]:
    """The block of an action, one pixel narrower than its time, and the microbatch in it."""
    left, right = (LABEL + round(time * scale) for time in (one.start, one.end))
    place = {"x": left, "y": top, "width": max(right - left - 1, 1), "height": BAR}
    fill = COLOURS[one.action.kind][0]
    named = tag("title", str(one.action))
    parts = [tag("g", named, tag("rect", fill=fill, opacity=_short(opacity), **place))]
    if right - left > DIGIT * len(str(one.action.microbatch)) + 3:
        parts.append(
            tag("text", one.action.microbatch, class_="number", x=_short((left + right - 1) / 2), y=top + 14)
        )
    return parts


def _legend(found: Replay, height: int) -> tuple[list[Markup], int]:
    """The kinds that occur with their colours, and the height of that line."""
    present = {one.action.kind for rank in found.ranks for one in rank}
    parts, left = [], LABEL
    for kind, (colour, name) in COLOURS.items():
        if kind in present:
            parts.append(tag("rect", x=left, y=height + 8, width=10, height=10, fill=colour))
            parts.append(tag("text", name, x=left + 15, y=height + 17))
            left += 15 + DIGIT * len(name) + 14
    parts.append(tag("rect", class_="wait", x=left, y=height + 8, width=10, height=10))
    parts.append(tag("text", "wait", x=left + 15, y=height + 17))
    return parts, ROW


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
