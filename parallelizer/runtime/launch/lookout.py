"""Detects ranks that have stopped making progress, and names those that the others wait for.

All ranks wait when one is slow, and all of them leave the collective together. So the start times of their
steps do not tell which rank was slow. Their stacks do, when no rank makes progress: the others wait for a
rank that is not inside a collective. Only this is reported. A rank that makes every step a little slower is
not found here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from parallelizer.runtime.launch.heartbeat import Beat
from parallelizer.runtime.launch.stacks import Stack

INTERVAL = 1.0
"""Seconds between two looks."""


class Lookout:
    """Whether the slowest rank moves. `stuck_after` is in seconds, 0 for never."""

    def __init__(self, stuck_after: float) -> None:
        self._limit = stuck_after or math.inf
        self._slowest: object = None
        self._quiet = 0.0
        self._looked = -math.inf
        self._said = False

    def is_due(self, now: float) -> bool:
        """Whether it is time for another look."""
        return now - self._looked >= INTERVAL

    def look(self, beats: Mapping[int, Beat | None], now: float) -> float | None:
        """Take the last beats of all ranks that are at work. Returns for how many seconds the slowest of them has
        not moved, when that is too long and has not been said yet.

        Nothing is too long before some rank has said its first beat: a worker need not beat at all.
        """
        # Seconds in which the whole machine or job was suspended do not count.
        passed, self._looked = min(now - self._looked, 3 * INTERVAL), now
        slowest = min(((b.when, b.count) if b else (-math.inf, 0) for b in beats.values()), default=None)
        if slowest is None or not any(beats.values()):
            return None
        if slowest != self._slowest:
            if self._said:  # it was slow, not stuck, and may be as slow again
                self._limit = max(self._limit, 2 * self._quiet)
            self._slowest, self._quiet, self._said = slowest, 0.0, False
            return None
        self._quiet += passed
        if self._said or self._quiet < self._limit:
            return None
        self._said = True
        return self._quiet


def describe(
    seconds: float, world: int, beats: Mapping[int, Beat | None], looks: Sequence[Mapping[int, Stack]]
) -> str:
    """What is said of ranks that have not moved for so long. `looks` are the stacks of those that have answered, taken
    more than once: a rank that was found in a collective and then elsewhere is at work, and the step is slow.
    """
    waiting = {rank for rank in beats if looks and all(rank in look and look[rank].waits for look in looks)}
    met = {rank for look in looks for rank, stack in look.items() if stack.waits}
    behind = set(beats) - met
    if behind and waiting:
        # A rank in an earlier step is behind for certain, one that computes in the same step very likely.
        first = min(_step(beats[rank]) for rank in behind)
        behind = {rank for rank in behind if _step(beats[rank]) == first}
        are = "is" if len(behind) == 1 else "are"
        wait = "waits" if len(waiting) == 1 else "wait"
        what = (
            f"{ranks_text(behind)} of {world} {are} behind, and {ranks_text(waiting)} {wait} in a collective"
        )
    elif len(waiting) == len(beats):
        what = f"all of {world} ranks wait in collectives, and not in the same one"
    else:
        what = f"all of {world} ranks are computing, so this step is slow"
    lines = [f"no progress for {seconds:.0f} s: {what}"]
    stacks = looks[-1] if looks else {}
    for group in _alike(behind if behind and waiting else set(beats), stacks):
        stack = stacks.get(group[0])
        where = f"{_place(beats[group[0]])}, "
        if stack is None:
            lines.append(
                f"  {ranks_text(group)}: {where}gives no stack: it is stopped, or blocked in a system call"
            )
        else:
            lines.append(f"  {ranks_text(group)}: {where}most recent call first")
            lines += [f"  {line}" for line in str(stack).splitlines()]
    return "\n".join(lines)


def _alike(ranks: set[int], stacks: Mapping[int, Stack]) -> list[list[int]]:
    """Ranks by the stack that they share, at most four of such groups."""
    groups: dict[Stack | None, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(stacks.get(rank), []).append(rank)
    return list(groups.values())[:4]


def _step(beat: Beat | None) -> float:
    return beat.step if beat else -math.inf


def _place(beat: Beat | None) -> str:
    if beat is None:
        return "before its first step"
    return f"step {beat.step}" + ("" if beat.doing == "step" else f" ({beat.doing})")


def ranks_text(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 3, 7`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)
