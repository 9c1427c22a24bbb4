"""The rows of the time of a step: shares of the computation and of waiting, and the costliest modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallelizer.report.rows.paths import ROOT
from parallelizer.simulate.time.predict import StepTime

KINDS = {"gemm": "GEMMs", "attention": "attention", "memory": "elementwise"}
"""The kinds of operators in words."""


@dataclass(frozen=True)
class TimeShare:
    """Something's seconds, and its share of the step from 0 to 1."""

    name: str
    seconds: float
    share: float


def compute_shares(time: StepTime) -> list[TimeShare]:
    """The computation by kind, the kinds in the order of KINDS."""
    return _shares(time, ((KINDS[kind], time.compute.get(kind, 0.0)) for kind in KINDS))


def wait_shares(time: StepTime) -> list[TimeShare]:
    """Where the computation stands, by the axis whose collectives it waits for, the longest first."""
    return sorted(_shares(time, time.waits.items()), key=lambda share: -share.seconds)


def costliest_modules(time: StepTime, number: int = 3) -> list[TimeShare]:
    """The modules whose computation takes longest, equal layers together."""
    sums: dict[str, float] = {}
    for module, seconds in time.modules.items():
        name = re.sub(r"\.\d+(?=\.|$)", ".*", module) or ROOT
        sums[name] = sums.get(name, 0.0) + seconds
    found = sorted(_shares(time, sums.items()), key=lambda share: -share.seconds)
    return found[:number]


def compared(one: StepTime, other: StepTime, names: Sequence[str]) -> list[str]:
    """Which of two steps is faster, and what the difference is made of, the largest parts first.

    Steps of different numbers of tokens are compared by tokens a second on each device.
    """
    parts = [
        f"{name}: {duration(time.seconds)} a step ({range_of(time)}), {time.tokens_per_second:,.0f} tokens/s a device"
        for name, time in zip(names, (one, other), strict=True)
    ]
    rates = one.tokens_per_second, other.tokens_per_second
    faster = faster_of(one, other)
    if faster is None:
        return [*parts, "neither is faster"]
    why = causes((one, other)[1 - faster], (one, other)[faster])
    return [*parts, f"{names[faster]} is {max(rates) / min(rates) - 1:.0%} faster: {'; '.join(why)}"]


def faster_of(one: StepTime, other: StepTime) -> int | None:
    """Which of two steps, 0 or 1, has more tokens a second on each device; None where they differ by less than 0.5 %."""
    rates = one.tokens_per_second, other.tokens_per_second
    if not all(rates) or abs(rates[1] / rates[0] - 1) < 0.005:
        return None
    return int(rates[1] > rates[0])


def causes(slow: StepTime, fast: StepTime) -> list[str]:
    """What makes the faster of two steps faster, the largest parts first: `waiting for tp less by 80% of the difference`."""
    return [
        f"{cause} {'less' if share > 0 else 'more'} by {abs(share):.0%} of the difference"
        for cause, share in shares_of_difference(slow, fast)
    ]


def shares_of_difference(slow: StepTime, fast: StepTime) -> list[tuple[str, float]]:
    """What the faster of two steps has less of, as shares of the difference, the three largest first; negative for what it has
    more of. The times are those of a token on one device, because batches and numbers of devices may differ.
    """
    before, after = _by_cause(slow), _by_cause(fast)
    whole = 1 / slow.tokens_per_second - 1 / fast.tokens_per_second
    saved = {cause: before.get(cause, 0.0) - after.get(cause, 0.0) for cause in {**before, **after}}
    ordered = sorted(saved.items(), key=lambda item: -abs(item[1]))
    return [(cause, seconds / whole) for cause, seconds in ordered[:3] if abs(seconds) > 0.05 * whole]


def _by_cause(time: StepTime) -> dict[str, float]:
    """Seconds for a token of one device, by kind of operator and by axis that is waited for."""
    tokens = time.tokens / time.ranks
    causes = {KINDS[kind]: seconds for kind, seconds in time.compute.items() if kind in KINDS}
    causes |= {f"waiting for {axis}": seconds for axis, seconds in time.waits.items()}
    return {cause: seconds / tokens for cause, seconds in causes.items()}


def _shares(time: StepTime, seconds: Iterable[tuple[str, float]]) -> list[TimeShare]:
    return [
        TimeShare(name, each, each / time.seconds if time.seconds else 0.0)
        for name, each in seconds
        if each > 0
    ]


def duration(seconds: float) -> str:
    """`19.3 s`, `820 ms`, `61 µs`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            number = seconds / size
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return "0 s"


def range_of(time: StepTime) -> str:
    """`18.1 to 20.9 s`: where four of five published runs lie."""
    low, high = duration(time.low).split(), duration(time.high).split()
    return f"{low[0]} to {high[0]} {high[1]}" if low[1] == high[1] else f"{' '.join(low)} to {' '.join(high)}"
