"""Decides when ranks that ended are started again, and when restarting is given up."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from parallelizer.runtime.launch.failures import LaunchError

IN_A_ROW = 3
"""Ends at the same place after which another start is taken to end there too."""


@dataclass(frozen=True)
class End:
    """How an attempt ended: the rank that ended first (None: no rank in particular), its last step (None: before its
    first), and how, in a line. `raised` says that it ended by an exception and not by a signal.
    """

    rank: int | None
    step: int | None
    how: str
    raised: bool = False

    @property
    def place(self) -> str:
        """`in step 7`."""
        return "before its first step" if self.step is None else f"in step {self.step}"

    def is_again(self, other: End) -> bool:
        """Whether it is the same end: the same rank in the same step. An exception that several ranks raise may come
        from any of them first.
        """
        if self.step != other.step:
            return False
        same = self.raised and other.raised and _reason(self) == _reason(other)
        return self.rank == other.rank or same


def _reason(end: End) -> str:
    """How it ended, without which rank."""
    return end.how.partition("failed")[2]


class Restarts:
    """Counts the ends of a run's attempts; `most` is how often it may be started again."""

    def __init__(self, most: int) -> None:
        if most < 0:
            raise ValueError(f"max_restarts is {most}: it must not be negative")
        self._most = most
        self._done = 0
        self._row: list[End] = []

    def again(self, end: End, error: LaunchError) -> None:
        """Say that it is started again. Raises `error` when it has been as often as it may, and another LaunchError
        when ranks have ended at the same place three times in a row.
        """
        self._row = [*self._row, end] if self._row and end.is_again(self._row[-1]) else [end]
        if len(self._row) == IN_A_ROW:
            raise _given_up(self._row, error)
        if self._done == self._most:
            raise error
        self._done += 1
        print(
            f"warning: {end.how}, {end.place}: starting again, {self._done} of {self._most}",
            file=sys.stderr,
            flush=True,
        )


def _given_up(row: list[End], error: LaunchError) -> LaunchError:
    rank, place = row[-1].rank, row[-1].place
    who = "the run" if rank is None else f"rank {rank}"
    ends = [f"  {number}: {end.how}" for number, end in enumerate(row, 1)]
    message = "\n".join(
        [
            f"{who} ended {len(row)} times in a row {place}: starting again does not help",
            *ends,
            "",
            error.message,
        ]
    )
    return LaunchError(message, error.help)
