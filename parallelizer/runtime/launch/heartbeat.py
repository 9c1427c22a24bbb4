"""The progress of a rank: the rank writes the number of the step that it begins, and a watcher reads it.

Ranks that `launch.start` has started write into one small file in the job's private folder, each at its own
offset, and their parent reads it. The last entry outlives the rank. A rank that joined others watches itself:
see `own_watch`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SAID = struct.Struct("=qqd32s")
_SUM = struct.Struct("=I")
_SLOT = 64
"""Bytes of one beat: number, step, time, what is being done, and a sum over them."""

_tell: Callable[[int, str], None] | None = None


@dataclass(frozen=True)
class Beat:
    """What a rank said last: the `count`-th time, at `when` of `time.monotonic`, which all of a machine share."""

    count: int
    step: int
    when: float
    doing: str


def beat(step: int, doing: str = "step") -> None:
    """Report to the watching process that this rank begins step `step`, or something else in it that may take long.

    A few microseconds: nothing is forced to disk. Without a watching process it does nothing. Of `doing` 32 bytes are
    kept.
    """
    if _tell is not None:
        _tell(step, doing)


def tell_to(listener: Callable[[int, str], None] | None) -> None:
    """From now on `beat(step, doing)` calls `listener(step, doing)`; None for no listener."""
    global _tell
    _tell = listener


class Beats:
    """The beats of all ranks of a start, in one file that they map into memory.

    A rank has two places and writes them in turn. It may be killed in the middle of one, and then the other
    still stands; and a reader that reads during a write sees a wrong sum, and takes the other.
    """

    def __init__(self, path: Path, ranks: int) -> None:
        with open(path, "r+b" if path.exists() else "w+b") as file:
            if os.fstat(file.fileno()).st_size == 0:
                # Written, not left out: a hole that a full disk cannot fill would kill the rank that writes.
                file.write(bytes(2 * _SLOT * ranks))
                file.flush()
            self._memory = mmap.mmap(file.fileno(), 2 * _SLOT * ranks)
        self._counts = [0] * ranks

    def say(self, rank: int, step: int, doing: str) -> None:
        """Write the next beat of a rank. Only that rank does."""
        count = self._counts[rank] = self._counts[rank] + 1
        said = _SAID.pack(count, step, time.monotonic(), doing.encode()[:32])
        start = (2 * rank + count % 2) * _SLOT
        self._memory[start : start + len(said) + _SUM.size] = said + _SUM.pack(zlib.crc32(said))

    def last(self, rank: int) -> Beat | None:
        """What a rank said last; None when it has not yet said anything."""
        places = (2 * rank * _SLOT, (2 * rank + 1) * _SLOT)
        return max(filter(None, map(self._read, places)), key=lambda found: found.count, default=None)

    def close(self) -> None:
        """Let go of the file."""
        self._memory.close()

    def _read(self, start: int) -> Beat | None:
        slot = self._memory[start : start + _SLOT]
        said = slot[: _SAID.size]
        count, step, when, doing = _SAID.unpack(said)
        if count == 0 or _SUM.unpack_from(slot, _SAID.size)[0] != zlib.crc32(said):
            return None
        return Beat(count, step, when, doing.rstrip(b"\0").decode(errors="ignore"))
