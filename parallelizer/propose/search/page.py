"""The results of a search as one HTML page that needs no network: memory against time, and the preset of every point."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from parallelizer.diagnostics.units import size
from parallelizer.propose.search import reasons
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.task import SearchTask
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.report.html.markup import Markup, join, tag
from parallelizer.report.rows.time import duration

WIDTH, HEIGHT = 720, 320
"""Units of the plot."""

LEFT, BELOW = 70, 34
"""Room for the numbers beside and below the plot."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is loaded, and nothing runs."""

STYLE = """
.front svg { width: 100%; max-width: 60rem; height: auto; }
.front text { font: 12px var(--sans); fill: var(--quiet); }
.front .axis { stroke: var(--strong-line); } .front .limit { stroke: var(--error); stroke-dasharray: 5 4; }
.front .estimate { fill: var(--strong-line); } .front .fits { fill: var(--tp); }
.front .large { fill: none; stroke: var(--error); }
.front .edge { fill: none; stroke: var(--tp); }
.results details:target > summary { font-weight: 600; }
.results pre { overflow-x: auto; background: var(--sunk); padding: .8rem; }
"""


def page(found: SearchResult, task: SearchTask, texts: Sequence[str]) -> str:
    """The page as text. `texts` are the presets of the results, best first."""
    title = f"{task.gpus:,} x {task.machine.name}"
    body = join(
        tag("header", tag("h1", title), tag("p", reasons.counts(found)), class_="page"),
        tag(
            "main",
            tag(
                "section",
                tag("h2", "Memory against time"),
                tag(
                    "p",
                    "Filled: dry-run whole. Rings: dry-run, and too large. Grey: estimated only. The line joins the dry-run "
                    "candidates that no other beats in both; the dashed line is the limit of memory. Time of a "
                    "step upward, peak of memory to the right. A filled point leads to its preset.",
                ),
                plot(found, task),
                class_="front",
            ),
            tag(
                "section",
                tag("h2", "What binds"),
                tag("ul", [tag("li", one) for one in reasons.binds(found, task)] if found.results else None),
            ),
            tag(
                "section",
                tag("h2", "Presets"),
                [_result(found, at, text) for at, text in enumerate(texts)],
                class_="results",
            ),
            tag(
                "section",
                tag("h2", "Too large"),
                tag("ul", [tag("li", reasons.too_large(o, task)) for o in found.too_large]),
            ),
            tag(
                "section",
                tag("h2", "Left out"),
                tag("ul", [tag("li", line) for line in reasons.left_out(found)]),
            ),
        ),
    )
    style = files("parallelizer.report.html").joinpath("page.css").read_text("utf-8")
    head = join(
        tag("meta", charset="utf-8"),
        tag("title", f"search: {title}, parallelizer"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("style", Markup(style + STYLE)),
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def front(some: Sequence[TracedWhole]) -> list[TracedWhole]:
    """Those that no other beats in both time and memory, by memory."""
    kept: list[TracedWhole] = []
    for one in sorted(some, key=lambda o: (o.peak, o.seconds)):
        if not kept or one.seconds < kept[-1].seconds:
            kept.append(one)
    return kept


def plot(found: SearchResult, task: SearchTask) -> Markup:
    """The plot: bytes to the right, seconds upward. Estimates much larger or slower than what was traced are left out."""
    traced = [*found.results, *found.too_large]
    most = max([task.memory, *(one.peak for one in traced)]) * 1.1
    slowest = max((one.seconds for one in traced), default=1.0) * 1.3

    def x(count: float) -> int:
        return LEFT + round((WIDTH - LEFT) * min(count / most, 1))

    def y(seconds: float) -> int:
        return round((HEIGHT - BELOW) * (1 - min(seconds / slowest, 1)))

    def dot(count: float, seconds: float, kind: str, radius: int, words: str) -> Markup:
        return tag("circle", tag("title", words), cx=x(count), cy=y(seconds), r=radius, class_=kind)

    known = {one.candidate for one in traced}
    shown = [e for e in found.priced if e.peak <= most and e.seconds <= slowest and e.candidate not in known]
    dots = [dot(e.peak, e.seconds, "estimate", 2, f"{e.candidate.words()}, estimated") for e in shown[:2000]]
    dots += [dot(o.peak, o.seconds, "large", 5, reasons.too_large(o, task)) for o in found.too_large]
    dots += [
        tag("a", dot(o.peak, o.seconds, "fits", 5, _words(o)), href=f"#result-{at}")
        for at, o in enumerate(found.results)
    ]
    edge = " ".join(f"{x(o.peak)},{y(o.seconds)}" for o in front(found.results))
    ground = HEIGHT - BELOW
    labels = [
        tag(
            "text",
            size(most * part),
            x=x(most * part),
            y=ground + 20,
            text_anchor="end" if part == 1 else "middle",
        )
        for part in (0.25, 0.5, 0.75, 1.0)
    ]
    labels += [
        tag("text", duration(slowest * part), x=LEFT - 8, y=y(slowest * part) + 12, text_anchor="end")
        for part in (0.25, 0.5, 0.75, 1.0)
    ]
    return tag(
        "svg",
        tag("line", x1=LEFT, y1=0, x2=LEFT, y2=ground, class_="axis"),
        tag("line", x1=LEFT, y1=ground, x2=WIDTH, y2=ground, class_="axis"),
        tag("line", x1=x(task.memory), y1=0, x2=x(task.memory), y2=ground, class_="limit"),
        tag("polyline", points=edge, class_="edge"),
        dots,
        labels,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label="Peak memory against the time of a step",
    )


def _result(found: SearchResult, at: int, text: str) -> Markup:
    one = found.results[at]
    behind = f" ({reasons.loses(found.results[0], one)})" if at else ""
    summary = tag("summary", f"{_words(one)}{behind}")
    return tag("details", summary, tag("pre", text), open=not at, id=f"result-{at}")


def _words(one: TracedWhole) -> str:
    return f"{duration(one.seconds)}, {size(one.peak)}: {one.candidate.words()} ({one.candidate.options()})"
