"""The tables and the plot of predicted runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.published.predictions import Prediction, Prepared

CLOSE = 0.02
"""Runs whose throughput differs by less than this share are in no order: a rerun differs as much."""


def row(one: Prediction) -> None:
    """Print one run: published and predicted tokens a second on each GPU, the error, the memory, and what the time is made of."""
    seconds = one.time.seconds or 1.0
    parts = {**one.time.compute, **{f"wait {axis}": s for axis, s in one.time.waits.items()}}
    shares = " ".join(f"{name} {s / seconds:.0%}" for name, s in parts.items() if s / seconds >= 0.01)
    memory = f"{one.memory:6.1f} {one.predicted_memory:6.1f} GiB" if one.memory else " " * 17
    name = one.prepared.row.id
    print(
        f"{name:<38} {one.published:>8,.0f} {one.predicted:>8,.0f} {100 * one.error:>+7.1f} %  {memory}  {shares}",
        flush=True,
    )


def errors(predictions: Sequence[Prediction]) -> list[float]:
    return sorted(abs(p.error) for p in predictions)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted values lies."""
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else 0.0


def sources(predictions: Sequence[Prediction]) -> None:
    """Print the errors by source, and the five worst rows."""
    print(f"\n{'source':<24} rows   mean  median   worst")
    by_source: dict[str, list[Prediction]] = {}
    for one in predictions:
        by_source.setdefault(one.prepared.row.source, []).append(one)
    for source, rows in by_source.items():
        found = errors(rows)
        mean, median = statistics.mean(found), statistics.median(found)
        print(f"{source:<24} {len(rows):>4} {mean:>6.1%} {median:>7.1%} {found[-1]:>7.1%}")
    worst = sorted(predictions, key=lambda p: -abs(p.error))[:5]
    print("\nthe worst: " + ", ".join(f"{p.prepared.row.id} {100 * p.error:+.0f} %" for p in worst))


def totals(predictions: Sequence[Prediction]) -> None:
    """Print the lines that a script reads."""
    found = errors(predictions)
    right, pairs = in_order(predictions)
    with_memory = [p for p in predictions if p.memory]
    near = sum(abs(p.predicted_memory / p.memory - 1) <= 0.1 for p in with_memory if p.memory)
    print(f"mean error: {100 * statistics.mean(found or [0.0]):.1f} %")
    print(f"median error: {100 * statistics.median(found or [0.0]):.1f} %")
    print(f"90th percentile: {100 * quantile(found, 0.9):.1f} %")
    print(f"pairs in order: {right} of {pairs}")
    print(f"peak memory within 10 %: {near} of {len(with_memory)}")


def in_order(predictions: Sequence[Prediction]) -> tuple[int, int]:
    """Of pairs of runs of one source, model, GPU, precision and length with different meshes: how many are predicted in the order
    of their published throughput. Pairs closer than CLOSE are left out.
    """
    right = pairs = 0
    for a, b in itertools.combinations(predictions, 2):
        if _alike(a.prepared) != _alike(b.prepared) or a.prepared.row.mesh == b.prepared.row.mesh:
            continue
        if abs(a.published / b.published - 1) < CLOSE:
            continue
        pairs += 1
        right += (a.published > b.published) == (a.predicted > b.predicted)
    return right, pairs


def _alike(one: Prepared) -> tuple[Any, ...]:
    run = one.row.run
    return (
        one.row.source,
        run["model"],
        run["gpu"],
        run["precision"],
        run["seq_len"],
        run["ac"],
        run.get("compile"),
    )


def spread(predictions: Sequence[Prediction]) -> float:
    """The standard deviation of the logarithms of predicted by published throughput."""
    return math.sqrt(statistics.mean(math.log(p.predicted / p.published) ** 2 for p in predictions))


COLUMNS, LINES = 72, 24


def text_plot(predictions: Sequence[Prediction]) -> str:
    """Predicted against published tokens a second on each GPU as text, in logarithms: a letter for each source, dots on the
    diagonal. Empty without predictions.
    """
    if not predictions:
        return ""
    values = [math.log10(v) for p in predictions for v in (p.published, p.predicted)]
    low, high = min(values) - 0.05, max(values) + 0.05
    canvas = [[" "] * COLUMNS for _ in range(LINES)]

    def put(x: float, y: float, letter: str) -> None:
        column = round((x - low) / (high - low) * (COLUMNS - 1))
        canvas[LINES - 1 - round((y - low) / (high - low) * (LINES - 1))][column] = letter

    for i in range(COLUMNS):
        at = low + (high - low) * i / (COLUMNS - 1)
        put(at, at, ".")
    names = list(dict.fromkeys(p.prepared.row.source for p in predictions))
    for p in predictions:
        put(math.log10(p.published), math.log10(p.predicted), _letter(names, p.prepared.row.source))
    legend = ", ".join(f"{_letter(names, name)} {name}" for name in names)
    axes = f"published, {10**low:,.0f} to {10**high:,.0f} tokens/s a GPU; predicted upwards, the same"
    return "\n".join(
        ["", *("|" + "".join(line).rstrip() for line in canvas), "-" * COLUMNS, axes, legend, ""]
    )


def _letter(names: Sequence[str], name: str) -> str:
    return chr(ord("a") + names.index(name) % 26)


SIZE, EDGE = 640, 60
COLOURS = ("#2f6fb0", "#d0822b", "#2f8f7d", "#8463ad", "#b4516f", "#7a7a36", "#4a4a4a", "#bf6079")


def plot(predictions: Sequence[Prediction]) -> str:
    """Predicted against published tokens a second on each GPU, in logarithms, with a band of 10 % around the diagonal."""
    values = [v for p in predictions for v in (p.published, p.predicted)] or [1.0]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    room = SIZE - 2 * EDGE

    def place(value: float) -> float:
        return EDGE + room * (math.log10(value) - low) / (high - low)

    band = room * math.log10(1.1) / (high - low)
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE + 180} {SIZE}" font-family="sans-serif" font-size="13">',
        f'<rect width="{SIZE + 180}" height="{SIZE}" fill="#fff"/>',
        f'<path d="M{EDGE} {SIZE - EDGE - band:.1f}L{SIZE - EDGE - band:.1f} {EDGE}H{SIZE - EDGE}V{EDGE + band:.1f}'
        f'L{EDGE + band:.1f} {SIZE - EDGE}H{EDGE}Z" fill="#eef2f6"/>',
        f'<path d="M{EDGE} {SIZE - EDGE}L{SIZE - EDGE} {EDGE}" stroke="#999" fill="none"/>',
        f'<path d="M{EDGE} {EDGE}V{SIZE - EDGE}H{SIZE - EDGE}" stroke="#333" fill="none"/>',
        f'<text x="{SIZE / 2}" y="{SIZE - 18}" text-anchor="middle">published, tokens/s a GPU</text>',
        f'<text x="20" y="{SIZE / 2}" text-anchor="middle" transform="rotate(-90 20 {SIZE / 2})">predicted</text>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = place(10.0**power)
        found.append(f'<text x="{at:.1f}" y="{SIZE - EDGE + 18}" text-anchor="middle">{10**power:,}</text>')
        found.append(f'<text x="{EDGE - 6}" y="{SIZE - at + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    names = list(dict.fromkeys(p.prepared.row.source for p in predictions))
    for p in predictions:
        colour = COLOURS[names.index(p.prepared.row.source) % len(COLOURS)]
        title = escape(f"{p.prepared.row.id}: {100 * p.error:+.0f} %")
        found.append(
            f'<circle cx="{place(p.published):.1f}" cy="{SIZE - place(p.predicted):.1f}" r="4" fill="{colour}" '
            f'fill-opacity="0.75"><title>{title}</title></circle>'
        )
    for i, name in enumerate(names):
        y = EDGE + 20 * i
        found.append(f'<circle cx="{SIZE - 30}" cy="{y}" r="4" fill="{COLOURS[i % len(COLOURS)]}"/>')
        found.append(f'<text x="{SIZE - 20}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*found, "</svg>"]) + "\n"
