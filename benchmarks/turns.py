"""Several ways to do one thing, timed turn by turn in the same ranks, as shares of the hardware's limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

Times = dict[str, list[float]]
Quartiles = tuple[float, float, float]


def in_turns(calls: Mapping[str, Callable[[], None]], rounds: int) -> Times:
    """By name, this rank's seconds of each round; a first round is not counted."""
    times: Times = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            started = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - started)
    return times


@dataclass(frozen=True)
class Way:
    """One way: median seconds of the slowest rank, quartiles of its share of the limit in per cent, and how many times faster
    than another way it is, turn by turn.
    """

    name: str
    seconds: float
    share: Quartiles
    faster: float


def compared(found: Sequence[Times], against: str) -> tuple[float, Iterator[Way]]:
    """The limit, which is the time of `unsharded` over the ranks, and every other way, from what all ranks measured."""
    slowest = {name: [max(turn) for turn in zip(*(f[name] for f in found), strict=True)] for name in found[0]}
    limit = [t / len(found) for t in slowest.pop("unsharded")]

    def ways() -> Iterator[Way]:
        for name, times in slowest.items():
            low, middle, high = statistics.quantiles(
                (100 * a / b for a, b in zip(limit, times, strict=True)), n=4
            )
            faster = statistics.median(b / a for a, b in zip(times, slowest[against], strict=True))
            yield Way(name, statistics.median(times), (low, middle, high), faster)

    return statistics.median(limit), ways()
