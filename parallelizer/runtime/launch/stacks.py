"""Stacks of ranks: a rank writes its Python stack when its parent asks, even if it hangs inside torch."""

from __future__ import annotations

import faulthandler
import itertools
import linecache
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

REQUEST: int = signal.SIGRTMIN + 3 if sys.platform == "linux" else signal.SIGUSR2
"""The signal that asks for a stack. SIGUSR1 asks to save and stop, SIGUSR2 is submitit's, where there is Slurm."""

_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py",
)
_WAITS = re.compile(r"\.(wait|tolist|item)\(|synchronize\(")
"""Calls that wait: for a collective (`work.wait()` has no frame of its own), or for everything that a GPU still has to do.
NCCL's collectives run on the GPU, so that a rank passes them, and stops where it reads a value back.
"""

_TORCH = os.path.dirname(torch.__file__) + os.sep

_THROUGH = (
    "torch/_ops.py",
    "torch/_library/autograd.py",
    "torch/distributed/c10d_logger.py",
    "torch/utils/_contextlib.py",
)
"""Frames that only pass a call on."""

_BELOW = ("parallelizer/runtime/launch/rank.py",)
_AROUND = ("torch/nn/modules/module.py",)
_LINES = 16

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """A rank's main thread, innermost frame first; never empty."""

    frames: tuple[Frame, ...]

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, as far as can be told: it stands inside one of torch's collectives,
        or at a line that waits for one, or for the GPU.
        """
        inner = next((f for f in self.frames if not f.file.endswith(_THROUGH)), self.frames[0])
        line = linecache.getline(inner.file, inner.line)
        return inner.file.endswith(_COLLECTIVES) or _WAITS.search(line) is not None

    @property
    def place(self) -> Frame:
        """The innermost frame outside of torch."""
        return next((f for f in self.frames if not f.file.startswith(_TORCH)), self.frames[0])

    def __str__(self) -> str:
        """What a person wants to see: down to the worker, and without what torch puts around each module."""
        ours = itertools.takewhile(lambda frame: not frame.file.endswith(_BELOW), self.frames)
        shown = [f"  {frame}" for frame in ours if not frame.file.endswith(_AROUND)]
        return "\n".join([*shown[:_LINES], *(["  ..."] if len(shown) > _LINES else [])])


def answer_requests(folder: Path, rank: int) -> None:
    """From now on, to the end of this process, write its stack into `folder/stack.<rank>` on each request.

    The thread that the signal reaches is the main one, and only that one is written: the others go on running,
    and reading a running thread's frames may crash a rank that is merely slow.
    """
    unready = folder / f"unready.{rank}"
    stream = open(unready, "w")  # noqa: SIM115  # faulthandler keeps it open
    faulthandler.register(REQUEST, file=stream, all_threads=False)
    # Only now may it be asked: without a handler the signal would end it.
    unready.replace(folder / f"stack.{rank}")


def ask(folder: Path, pids: Mapping[int, int], within: float = 1.0) -> dict[int, Stack]:
    """The stacks of those ranks, by rank with process id, that answer within so many seconds."""
    sizes = {rank: _size(folder, rank) for rank in pids}
    asked = {rank: size for rank, size in sizes.items() if size is not None}
    for rank in asked:
        with suppress(ProcessLookupError):
            os.kill(pids[rank], REQUEST)
    answers: dict[int, Stack] = {}
    until = time.monotonic() + within
    while len(answers) < len(asked) and time.monotonic() < until:
        time.sleep(0.05)
        for rank in asked.keys() - answers.keys():
            with open(folder / f"stack.{rank}", errors="replace") as stream:
                stream.seek(asked[rank])
                text = stream.read()
            if frames := _FRAME.findall(text):
                answers[rank] = Stack(tuple(Frame(file, int(line), name) for file, line, name in frames))
    return answers


def _size(folder: Path, rank: int) -> int | None:
    try:
        return (folder / f"stack.{rank}").stat().st_size
    except FileNotFoundError:
        return None
