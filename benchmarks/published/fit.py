"""The constants of the clock fitted to published runs, and cross-validated by source.

Layers are alike, so that a fit replays a few of them and adds what each further layer takes.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import statistics
from collections.abc import Callable, Sequence

from benchmarks.published.predictions import Prediction, Prepared, predict_row
from parallelizer.simulate.record.operators import Moment
from parallelizer.simulate.time.constants import Constants

PRIOR = Constants(
    gemm=0.85,
    attention=0.6,
    attention_backward=0.75,
    memory=0.8,
    network=0.8,
    contention=0.1,
    power=0.6,
    early=0.85,
    straggling=0.01,
)
"""What is plausible before any run is looked at: where the search begins, and where it stays without evidence."""

BOUNDS = {
    "gemm": (0.5, 1.0),
    "attention": (0.3, 1.0),
    "attention_backward": (0.4, 1.0),
    "memory": (0.3, 1.0),
    "network": (0.3, 0.95),
    "contention": (0.0, 0.4),
    "power": (0.0, 1.3),
    "early": (0.6, 1.0),
    "straggling": (0.0, 0.04),
}
"""The constants that are fitted, and where they can lie."""

WIDTH = 0.12
"""The error in logarithms from which on a row pulls no harder: published rows have outliers."""


def thinned(prepared: Prepared) -> Prepared:
    """The row with two short models in the place of the whole one, each by its lines."""
    short = [tuple(_short(line, keep)) for line in prepared.lines for keep in (KEEP, KEEP + 1)]
    return dataclasses.replace(prepared, lines=tuple(short))


KEEP = 4


def _short(line: Sequence[Moment], keep: int) -> list[Moment]:
    """The line with the first `keep` - 1 layers and the last."""
    last = max((_layer(m.module) for m in line), default=-1)
    return [m for m in line if not keep - 1 <= _layer(m.module) < last]


def _layer(module: str) -> int:
    found = re.match(r"layers\.(\d+)", module)
    return int(found[1]) if found else -1


def layers(prepared: Prepared) -> int:
    return 1 + max((_layer(m.module) for m in prepared.traced.line), default=0)


def throughput(prepared: Prepared, count: int, constants: Constants) -> float:
    """Tokens a second on each GPU, of a thinned row with `count` layers in truth."""
    from benchmarks.published.predictions import LINE_PARTS, step_seconds

    seconds = [step_seconds(prepared, line, constants) for line in prepared.lines]
    whole = [a + (count - KEEP) * (b - a) for a, b in zip(seconds[::2], seconds[1::2], strict=True)]
    step = whole[-1]
    if prepared.composed.parts > LINE_PARTS:
        step += (prepared.composed.parts - LINE_PARTS) * (whole[1] - whole[0])
    return prepared.tokens / prepared.traced.mesh.world_size / step


def loss(rows: Sequence[tuple[Prepared, int]], constants: Constants) -> float:
    """The mean over sources of the mean robust error of their rows, and a little for distance from what is plausible."""
    by_source: dict[str, list[float]] = {}
    for prepared, count in rows:
        published = prepared.row.tokens_per_second
        assert published is not None  # noqa: S101
        error = math.log(throughput(prepared, count, constants) / published)
        by_source.setdefault(prepared.row.source, []).append(_robust(error))
    # A source weighs as the root of its rows: many rows of one source share their faults.
    weights = {source: math.sqrt(len(errors)) for source, errors in by_source.items()}
    mean = sum(weights[s] * statistics.mean(e) for s, e in by_source.items()) / sum(weights.values())
    start = PRIOR
    away = sum(
        ((getattr(constants, name) - getattr(start, name)) / (high - low)) ** 2
        for name, (low, high) in BOUNDS.items()
    )
    return mean + 0.002 * away


def _robust(error: float) -> float:
    return error**2 / 2 if abs(error) < WIDTH else WIDTH * (abs(error) - WIDTH / 2)


def fit(rows: Sequence[tuple[Prepared, int]], rounds: int = 4) -> Constants:
    """The constants of the least loss, by a search along each in turn with shrinking steps."""
    best = PRIOR
    least = loss(rows, best)
    step = 0.15
    for _ in range(rounds):
        names = list(BOUNDS)
        random.Random(0).shuffle(names)
        for name in names:
            low, high = BOUNDS[name]
            for sign in (1, -1):
                while True:
                    value = min(high, max(low, getattr(best, name) + sign * step * (high - low)))
                    tried = dataclasses.replace(best, **{name: round(value, 4)})
                    found = loss(rows, tried) if tried != best else math.inf
                    if found >= least - 1e-9:
                        break
                    best, least = tried, found
        step /= 1.8
    return best


def cross_validated(
    rows: Sequence[tuple[Prepared, int]], tell: Callable[[str], None] = lambda text: None
) -> list[tuple[Prepared, float, Constants]]:
    """For each row its error in logarithms under constants that were fitted without its source."""
    found = []
    for source in sorted({p.row.source for p, _ in rows}):
        constants = fit([(p, n) for p, n in rows if p.row.source != source])
        tell(f"without {source}: {constants}")
        for prepared, count in rows:
            if prepared.row.source == source:
                published = prepared.row.tokens_per_second
                assert published is not None  # noqa: S101
                found.append(
                    (prepared, math.log(throughput(prepared, count, constants) / published), constants)
                )
    return found


__all__ = ["Prediction", "cross_validated", "fit", "layers", "predict_row", "thinned"]
