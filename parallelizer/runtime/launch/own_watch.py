"""A rank that torchrun or Slurm started watches itself, because it has no parent process of ours."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallelizer.runtime.launch import heartbeat, lacking, records

MOST_READ = 1024
"""Ranks up to which rank 0 reads all records: each has up to a megabyte."""


@contextmanager
def own_watch(rank: int, world: int, stuck_after: float, private: Path | None = None) -> Iterator[None]:
    """Inside, say on stderr, once for each stall, when this rank has not called `heartbeat.beat` for `stuck_after`
    seconds (0 for never) after it last did: its rank, its step, and the Python stacks of its threads.

    All ranks say it, for all wait when one is stuck. The one that does not stand in a collective is the one to
    look at. The watching thread needs the interpreter's lock, which whoever waits for others has let go of.

    A rank of NCCL that listens in `private` (`records.listen_in`) then also writes the record of its collectives to the folder of
    `records.write_to`, and rank 0 reads all of them, if all ranks see this folder, and says which ranks lack a collective.
    """
    watch = _OwnWatch(rank, world, stuck_after or math.inf, private)
    thread = threading.Thread(target=watch.run, name="watches this rank", daemon=True)
    thread.start()
    heartbeat.tell_to(watch.tell)
    try:
        yield
    finally:
        heartbeat.tell_to(None)
        watch.over.set()
        thread.join()


class _OwnWatch:
    def __init__(self, rank: int, world: int, limit: float, private: Path | None) -> None:
        self.rank, self.world, self.limit, self.private = rank, world, limit, private
        self.over = threading.Event()
        self.said: tuple[int, str, float] | None = None
        self.main = threading.get_ident()

    def tell(self, step: int, doing: str) -> None:
        self.said = (step, doing, time.monotonic())

    def run(self) -> None:
        told = None
        while not self.over.wait(min(1.0, self.limit / 4)):
            said = self.said
            if said is None or said is told or time.monotonic() - said[2] < self.limit:
                continue
            told = said
            sys.stderr.write(self._text(*said))
            sys.stderr.flush()
            for line in self._lacking(time.monotonic() - said[2]):
                sys.stderr.write(f"  {line}\n")
            sys.stderr.flush()

    def _lacking(self, stalled: float) -> list[str]:
        """What the records of all ranks say, on rank 0."""
        place = records.place()
        if self.private is None or place is None:
            return []
        records.ask(self.private, [self.rank])
        if self.rank != 0 or self.world > MOST_READ:
            return []
        # The others ask themselves when their own limit is over, some before this rank.
        read, unreadable = records.read_all(place, self.world, time.time() - stalled, 2 * records.ANSWER)
        return lacking.describe(read, unreadable)

    def _text(self, step: int, doing: str, when: float) -> str:
        place = f"step {step}" + ("" if doing == "step" else f" ({doing})")
        seconds = time.monotonic() - when
        stacks = sys._current_frames()
        stacks.pop(threading.get_ident(), None)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [
            f"warning: rank {self.rank} of {self.world}: no progress for {seconds:.0f} s in {place}; its stack:\n"
        ]
        for ident in sorted(stacks, key=lambda ident: ident != self.main):
            lines.append(f"  thread {names.get(ident, ident)}, most recent call last:\n")
            lines += [f"  {line}" for line in traceback.format_stack(stacks[ident])]
        return "".join(lines)
