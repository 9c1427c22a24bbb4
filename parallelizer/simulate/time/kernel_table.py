"""Measured kernels of one device: products of matrices, attention, and collectives inside a node.

A table is JSON, made by benchmarks/kernel_tables.py or by measuring this machine (`measure.py`). Rates are interpolated in the
logarithms of sizes and rates. Outside the grid the nearest rate stands; a dim below the grid costs as much as the grid's first.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from parallelizer.simulate.time.installed_kernels import derived, installed

INSTALLED = "installed:"

LIKE = {"float16": "bfloat16", "float8_e4m3fn": "float8", "float8_e5m2": "float8"}
"""Dtypes that run at the rate of another."""


@dataclass(frozen=True)
class GemmGrid:
    """TFLOP/s of [m, k] times [k, n] on a grid; 0 where nothing was measured."""

    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    tflops: Sequence[Sequence[Sequence[float]]]

    def seconds(self, m: int, n: int, k: int) -> float:
        """The time of one product, by its eight neighbours on the grid."""
        size = [max(x, axis[0]) for x, axis in zip((m, n, k), self.axes, strict=True)]
        places = [_place(x, axis) for x, axis in zip(size, self.axes, strict=True)]
        rate = weight = 0.0
        for corner in range(8):
            share, index = 1.0, []
            for d, (low, part) in enumerate(places):
                up = corner >> d & 1
                share *= part if up else 1 - part
                index.append(min(low + up, len(self.axes[d]) - 1))
            value = self.tflops[index[0]][index[1]][index[2]]
            if share and value:
                rate += share * math.log(value)
                weight += share
        tflops = math.exp(rate / weight) if weight else self._nearest(size)
        return 2.0 * size[0] * size[1] * size[2] / (tflops * 1e12)

    def _nearest(self, size: Sequence[int]) -> float:
        """The rate of the measured point that is nearest in logarithms."""
        best, found = math.inf, 1.0
        for i, m in enumerate(self.axes[0]):
            for j, n in enumerate(self.axes[1]):
                for x, k in enumerate(self.axes[2]):
                    value = self.tflops[i][j][x]
                    away = sum(abs(math.log(a / b)) for a, b in zip(size, (m, n, k), strict=True))
                    if value and away < best:
                        best, found = away, value
        return found


def _place(x: float, axis: Sequence[int]) -> tuple[int, float]:
    """The point of the axis before x, and how far x is towards the next, from 0 to 1, in logarithms."""
    low = min(max(bisect.bisect_right(axis, x) - 1, 0), len(axis) - 1)
    if low == len(axis) - 1:
        return low, 0.0
    return low, math.log(x / axis[low]) / math.log(axis[low + 1] / axis[low])


@dataclass(frozen=True)
class KernelTable:
    """What was measured of one device. `gemm` is by dtype, `attention` TFLOP/s of causal attention's forward by head size at
    `lengths`, `collectives` seconds by kind and ranks at `sizes` bytes of the whole tensor.
    """

    source: str
    gemm: Mapping[str, GemmGrid]
    lengths: tuple[int, ...]
    attention: Mapping[int, tuple[float, ...]]
    sizes: tuple[int, ...]
    collectives: Mapping[str, Mapping[int, tuple[float, ...]]]

    def attention_tflops(self, length: float, size: int) -> float | None:
        """The rate of attention's forward over `length` positions with heads of `size`; None without measurements."""
        if not self.attention:
            return None
        near = min(self.attention, key=lambda known: abs(math.log(known / max(size, 1))))
        rates = self.attention[near]
        low, part = _place(max(length, self.lengths[0]), self.lengths)
        high = min(low + 1, len(rates) - 1)
        return math.exp((1 - part) * math.log(rates[low]) + part * math.log(rates[high]))

    def collective_seconds(self, kind: str, ranks: int, payload: int) -> float | None:
        """The time of a collective inside a node; None for a kind that was not measured.

        Between two sizes the logarithm of the time is interpolated; beyond the last, the time grows with the bytes. Of a
        number of ranks that was not measured, the nearest one's time, by the share of the bytes that crosses links.
        """
        known = self.collectives.get(kind)
        if not known or ranks < 2:
            return None
        near = min(known, key=lambda measured: (abs(math.log(measured / ranks)), -measured))
        times, sizes = known[near], self.sizes[-len(known[near]) :]
        if payload >= sizes[-1]:
            seconds = times[-1] * payload / sizes[-1]
        else:
            low, part = _place(max(payload, sizes[0]), sizes)
            high = min(low + 1, len(times) - 1)
            seconds = math.exp((1 - part) * math.log(times[low]) + part * math.log(times[high]))
        return seconds * ((ranks - 1) / ranks) / ((near - 1) / near)


def parse_table(document: Mapping[str, Any]) -> KernelTable:
    """A table from its JSON form."""
    attention = document.get("attention") or {"length": [], "tflops": {}}
    collectives = document.get("collectives") or {"bytes": [], "microseconds": {}}
    return KernelTable(
        str(document.get("source", "")),
        {
            dtype: GemmGrid((tuple(grid["m"]), tuple(grid["n"]), tuple(grid["k"])), grid["tflops"])
            for dtype, grid in document.get("gemm", {}).items()
        },
        tuple(attention["length"]),
        {int(size): tuple(rates) for size, rates in attention["tflops"].items()},
        tuple(collectives["bytes"]),
        {
            kind: {int(ranks): tuple(t * 1e-6 for t in times) for ranks, times in by_ranks.items()}
            for kind, by_ranks in collectives["microseconds"].items()
        },
    )


@functools.cache
def load_table(name: str) -> KernelTable:
    """A shipped table by its name, one at a path, or `installed:NAME` from the installed `aiconfigurator-core`. Raises OSError,
    ValueError and ImportError where there is none.
    """
    if name.startswith(INSTALLED):
        return parse_table(derived(name.removeprefix(INSTALLED), installed()))
    path = Path(name)
    if path.suffix == ".json":
        return parse_table(json.loads(path.read_text("utf-8")))
    text = files("parallelizer.simulate.time").joinpath("kernels", f"{name}.json").read_text("utf-8")
    return parse_table(json.loads(text))


def shipped_tables() -> list[str]:
    """The names of the shipped tables."""
    folder = files("parallelizer.simulate.time").joinpath("kernels")
    return sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".json"))
