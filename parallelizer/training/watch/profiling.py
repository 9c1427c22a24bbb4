"""`train.profile=3:5`: traces of some steps by torch's profiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallelizer import torch_private
from parallelizer.training.settings import Steps

MOST_RANKS = 8
"""The first ranks, a node's, are profiled: traces of a thousand ranks are of no use."""


class Profiling:
    """Profiles this rank between two steps, and writes `<folder>/profile/rank<k>.trace.json` (for Perfetto, or
    chrome://tracing), and on CUDA what its allocator did, `rank<k>.memory.pickle` (for pytorch.org/memory_viz).

    Where the run ends before the last step, what there is is written. Times are longer under it: shapes and memory
    are recorded with each operator.
    """

    def __init__(self, steps: Steps | None, folder: Path | None, rank: int, device: torch.device) -> None:
        wanted = steps is not None and folder is not None and rank < MOST_RANKS
        self.steps = steps if wanted else None
        self.folder, self.rank, self.device = folder, rank, device
        self.written: Path | None = None
        self._stack = ExitStack()
        self._profile: profile | None = None

    def covers(self, step: int) -> bool:
        """Whether a step is profiled here."""
        return self.steps is not None and self.steps[0] <= step <= self.steps[1]

    def step(self, step: int) -> Any:
        """A context around a step, which names it in the trace; it begins with the first of them."""
        if not self.covers(step):
            return ExitStack()
        if self._profile is None:
            self._begin()
        return record_function(f"step {step}")

    def after(self, step: int) -> None:
        """A step has ended: behind the last of them the files are written."""
        if self._profile is not None and self.steps is not None and step >= self.steps[1]:
            self._end()

    def _begin(self) -> None:
        assert self.folder is not None  # noqa: S101 - for the type: `covers` was true
        place = self.folder / "profile"
        place.mkdir(exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            self._stack.enter_context(torch_private.memory_history(place / f"rank{self.rank}.memory.pickle"))
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        with _hushed():
            self._profile.__enter__()

    def _end(self) -> None:
        if self._profile is None or self.folder is None:
            return
        ended, self._profile = self._profile, None
        with _hushed():
            ended.__exit__(None, None, None)
        self.written = self.folder / "profile"
        path = self.written / f"rank{self.rank}.trace.json"
        ended.export_chrome_trace(str(path))
        self._stack.close()

    def __enter__(self) -> Profiling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


@contextmanager
def _hushed() -> Iterator[None]:
    """Without what the profiler's own library writes to stderr as it starts and ends, whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
