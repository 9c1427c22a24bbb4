"""What a step runs on its device, by kind: matrix products, attention, and the rest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from parallelizer.simulate.rehearse.quiet import quiet

KINDS = {
    "attention": re.compile(r"flash|fmha|attention|sdpa|mha_", re.I),
    "matrix products": re.compile(
        r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitk|::mm$|::bmm$|::addmm$|::linear$", re.I
    ),
    "copies": re.compile(r"memcpy|memset|copy|cat|chunk", re.I),
}
"""By the names of kernels, or of operators on a CPU; the first that fits."""
REST = "elementwise, reductions, optimizer"


@dataclass(frozen=True)
class Kernels:
    """`count` kernels, on a CPU operators, that took `seconds` by kind; `busy` is the share of the step in which the device ran
    any. `costliest` are those with the most seconds, by name.
    """

    count: int
    seconds: Mapping[str, float]
    busy: float
    costliest: Mapping[str, float]


def kernels_of(step: Callable[[], object], device: str) -> Kernels:
    """The kernels of one call of `step`, under torch's profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    if device == "cuda":
        torch.cuda.synchronize()
    with quiet(), profile(activities=activities) as seen:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    if device == "cuda":
        ran = [
            (e.name, e.time_range.start, e.time_range.end)
            for e in seen.events()
            if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
        ]
        spans = [(start, end) for _, start, end in ran]
        times = [(name, end - start) for name, start, end in ran]
    else:
        spans = []
        times = [(e.name, e.self_cpu_time_total) for e in seen.events() if e.name.startswith("aten::")]
    seconds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for name, microseconds in times:
        seconds[_kind(name)] += microseconds / 1e6
        names[name] += microseconds / 1e6
    return Kernels(len(times), dict(seconds), _share(spans), dict(names.most_common(8)))


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), REST)


def _share(spans: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first to the last in which at least one runs; 1 where nothing is known."""
    busy, first, last = 0.0, None, 0.0
    for start, end in sorted(spans):
        if first is None:
            first = last = start
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy / (last - first) if first is not None and last > first else 1.0
