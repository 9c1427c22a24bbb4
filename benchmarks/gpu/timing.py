"""Seconds of a call on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds_of(call: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Median seconds of a call, after three that do not count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return statistics.median(times)
