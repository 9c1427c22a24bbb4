"""The memory that a rank uses, as far as it can be measured during a run."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from parallelizer import torch_private
from parallelizer.simulate.record.planned import held


@dataclass(frozen=True)
class Memory:
    """Bytes now and at most. Of CUDA's allocator they are what a dry run predicts; of a process (`whole`) they hold
    Python and torch too, and compare with nothing.
    """

    now: int
    peak: int
    whole: bool = False


def memory(device: torch.device) -> Memory | None:
    """What a rank has in use on its device; on a CPU the process's resident set, where the system tells."""
    if device.type == "cuda":
        return Memory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        now = pages * os.sysconf("SC_PAGE_SIZE")
        return Memory(now, max(now, most), whole=True)
    return None


class PeakOfStep:
    """The allocator's highest bytes while it is active, as a context; `bytes` has them behind it.

    On CUDA the allocator counts. On a CPU what it hands out and takes back inside is noted on top of the bytes of
    `before`, the tensors that are there; that costs a list of the step's operators while it lasts. What is taken back on
    other threads is not seen there, so that it may say too much (17 % at most in what was tried).
    """

    def __init__(self, device: torch.device, before: Iterable[torch.Tensor]) -> None:
        self.device = device
        self.bytes: int | None = None
        self.base = 0 if device.type == "cuda" else held(before)

    def __enter__(self) -> PeakOfStep:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._noting = torch_private.allocating()
            self._changes = self._noting.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
            return
        self._noting.__exit__(None, None, None)
        self.bytes = self.base + max(accumulate(self._changes), default=0)
