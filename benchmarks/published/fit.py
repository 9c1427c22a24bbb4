"""The constants of the clock fitted to published runs, and cross-validated by source.

The logarithm of a predicted time is nearly linear in the constants, so that a few steps of Gauss and Newton find them. Without a
source, the straight lines at the fitted constants say where they would lie; its rows are then predicted in full.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.predictions import Prediction, Prepared, in_use, predict_row
from parallelizer.simulate.time.constants import FITTED, FITTED_NAMES, Constants

Array = NDArray[np.float64]

PRIOR: Mapping[str, tuple[float, float]] = {
    "sustained": (0.85, 0.1),
    "attention_backward": (0.8, 0.1),
    "memory": (0.8, 0.1),
    "contention": (0.1, 0.1),
    "power": (0.5, 0.2),
    "straggling": (0.01, 0.01),
}
"""What is plausible before any run is looked at, and how far from it: where the search ends without evidence. It begins at the
constants that are shipped.
"""

HIGHEST = {"sustained": 1.0, "attention_backward": 1.0, "memory": 1.0, "contention": 0.4, "power": 1.0}
"""Where a share ends. None is below zero."""

WIDTH = 0.12
"""The error in logarithms from which on a row pulls no harder: published rows have outliers."""
NOISE = 0.1
"""The error in logarithms that a source is expected to have by itself."""
ROUNDS = 3
NEAR = 0.05
"""The search ends where no constant moves by more than this share of its plausible distance."""


def error_of(prepared: Prepared, constants: Constants) -> float:
    """The logarithm of predicted by published throughput."""
    found = predict_row(prepared, constants)
    return math.log(found.predicted / found.published)


@dataclasses.dataclass(frozen=True)
class Linear:
    """Errors near a point: `errors` [rows] at `at` [constants], and `slopes` [rows, constants]."""

    at: Array
    errors: Array
    slopes: Array
    sources: tuple[str, ...]

    def solved(self, without: str | None = None) -> Array:
        """The constants of the least loss among straight lines, over all sources but one."""
        names = [s for s in self.sources if s != without]
        kept = np.array([s != without for s in self.sources])
        # A source weighs as the root of its rows: many rows of one source share their faults.
        weights = np.array([1 / math.sqrt(names.count(s)) if s != without else 0.0 for s in self.sources])
        middle, width = (np.array([PRIOR[name][i] for name in FITTED_NAMES]) for i in (0, 1))
        highest = np.array([HIGHEST.get(name, math.inf) for name in FITTED_NAMES])
        point = self.at.copy()
        for _ in range(20):
            found = self.errors + self.slopes @ (point - self.at)
            pull = np.sqrt(weights * np.minimum(1.0, WIDTH / np.maximum(np.abs(found), 1e-9)))[kept] / NOISE
            left = np.vstack([self.slopes[kept] * pull[:, None], np.diag(1 / width)])
            right = np.concatenate([(self.slopes[kept] @ self.at - self.errors[kept]) * pull, middle / width])
            point = np.clip(np.linalg.lstsq(left, right, rcond=None)[0], 0.0, highest)
        return point


def linear(rows: Sequence[Prepared], at: Array) -> Linear:
    """The errors of rows and their slopes at a point, by differences."""
    errors = np.array([error_of(row, constants_of(at)) for row in rows])
    slopes = np.zeros((len(rows), len(FITTED_NAMES)))
    for i, name in enumerate(FITTED_NAMES):
        step = 0.3 * PRIOR[name][1] * (-1 if at[i] + PRIOR[name][1] > HIGHEST.get(name, math.inf) else 1)
        moved = at.copy()
        moved[i] += step
        slopes[:, i] = (np.array([error_of(row, constants_of(moved)) for row in rows]) - errors) / step
    return Linear(at, errors, slopes, tuple(row.row.source for row in rows))


def constants_of(point: Array) -> Constants:
    """The constants with the fitted ones at a point."""
    values = {name: round(float(value), 4) for name, value in zip(FITTED_NAMES, point, strict=True)}
    return Constants(**values)


def fit(rows: Sequence[Prepared], tell: Callable[[str], None] = lambda text: None) -> Linear:
    """The straight lines at the fitted constants, from which those without a source follow."""
    at = np.array([getattr(FITTED, name) for name in FITTED_NAMES])
    width = np.array([PRIOR[name][1] for name in FITTED_NAMES])
    found = linear(rows, at)
    for _ in range(ROUNDS - 1):
        before, at = at, found.solved()
        tell(str(constants_of(at)))
        if (np.abs(at - before) < NEAR * width).all():
            break
        found = linear(rows, at)
    return found


def cross_validated(
    rows: Sequence[Prepared], fitted: Linear, tell: Callable[[str], None] = lambda text: None
) -> list[Prediction]:
    """Every row predicted with constants that were fitted without its source."""
    found = []
    for source in dict.fromkeys(prepared.row.source for prepared in rows):
        constants = constants_of(fitted.solved(without=source))
        tell(f"without {source}: {constants}")
        share = reserved_share([one for one in rows if one.row.source != source])
        found += [
            dataclasses.replace(predict_row(one, constants), share=share)
            for one in rows
            if one.row.source == source
        ]
    return found


MEASURED_SHARES = (
    1.335, 1.071, 1.309, 1.143, 1.134, 1.155, 1.096, 1.429, 1.199, 1.067, 1.265, 1.260, 1.273, 1.271,
)  # fmt: skip
"""Memory reserved by memory requested in the rehearsals of more than 1 GiB in docs/gpu.md: a source of its own."""


def reserved_share(rows: Sequence[Prepared]) -> float:
    """What the allocator reserves by what is in use: the median of each source, and the mean of these."""
    by_source: dict[str, list[float]] = {"rehearsals": list(MEASURED_SHARES)}
    for one in rows:
        if one.row.peak_memory and not one.row.peak_is_in_use:
            share = one.row.peak_memory * 2**30 / in_use(one)
            by_source.setdefault(one.row.source, []).append(share)
    return statistics.mean(map(statistics.median, by_source.values()))
