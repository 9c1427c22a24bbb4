"""The highest memory of a real step, measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch

from parallelizer import torch_private
from parallelizer.simulate.record.planned import held


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
