"""The memory that a rank uses, as far as it can be measured during a run."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Memory:
    """Bytes now and at most. Of CUDA's allocator they are what a dry run predicts; of a process (`whole`) they hold
    Python and torch too, and compare with nothing. `reserved` is the most that CUDA's allocator held for them: with its gaps,
    and what it keeps for later.
    """

    now: int
    peak: int
    whole: bool = False
    reserved: int | None = None


def memory(device: torch.device) -> Memory | None:
    """What a rank has in use on its device; on a CPU the process's resident set, where the system tells."""
    if device.type == "cuda":
        return Memory(
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
        )
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        now = pages * os.sysconf("SC_PAGE_SIZE")
        return Memory(now, max(now, most), whole=True)
    return None
