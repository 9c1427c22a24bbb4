"""What allocators have given out. See `parallelizer.torch_private`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def allocating() -> Iterator[list[int]]:
    """A list that has, once it is left, the bytes that the CPU allocator handed out (positive) and took back (negative)
    inside, in order, of this thread. By the profiler of old, which starts in no time and prints nothing; waits for
    memory statistics of the CPU.
    """
    kind = torch.autograd.ProfilerState.CPU
    experimental = torch._C._profiler._ExperimentalConfig()
    config = torch.autograd.ProfilerConfig(kind, False, True, False, False, False, experimental)
    found: list[int] = []
    torch.autograd._enable_profiler_legacy(config)
    try:
        yield found
    finally:
        threads = torch.autograd._disable_profiler_legacy()
        found += [e.cpu_memory_usage() for events in threads for e in events if e.kind() == "memory_alloc"]


def allocations(function: Callable[[], object]) -> list[int]:
    """As `allocating`, while a function runs."""
    with allocating() as found:
        function()
    return found


@contextmanager
def memory_history(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write what CUDA's allocator did inside, with stacks, for https://pytorch.org/memory_viz. Documented by torch under
    these names, underscores and all; waits for public ones.
    """
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
        torch.cuda.memory._dump_snapshot(os.fspath(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
