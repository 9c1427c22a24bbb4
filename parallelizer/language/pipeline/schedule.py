"""What a pipeline schedule is, and what the files of `schedules/` build their orders with."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from parallelizer.language.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    Action,
    ActionKind,
    Order,
)

PLACEMENTS = {
    "loop": lambda stage, ranks: stage % ranks,
    "v": lambda stage, ranks: min(stage, 2 * ranks - 1 - stage),
}
"""The rank of a stage. `loop` starts again at rank 0 after the last rank. `v` turns around there, with two stages a
rank: rank 0 has the first and the last stage, so the loss is computed where the batch enters."""


@dataclass(frozen=True)
class Misfit:
    """Numbers that a schedule cannot run: the key of the preset to change, why, and the numbers that would do."""

    key: Literal["microbatches", "stages_per_rank"]
    message: str
    help: str


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    `order(ranks, stages_per_rank, microbatches)` gives the actions of each rank. `misfit` takes the same numbers and
    says why the schedule cannot run them, or None. `stages_per_rank` is the number of stages unless a preset sets it.
    """

    name: str
    doc: str
    placement: Literal["loop", "v"]
    stages_per_rank: int
    order: Callable[[int, int, int], Order]
    misfit: Callable[[int, int, int], Misfit | None]

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank that a stage lies on."""
        return PLACEMENTS[self.placement](stage, ranks)


class RankActions:
    """Collects the actions of one rank. Microbatches of a stage are taken in order, so an action is a kind and a stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._count: Counter[tuple[ActionKind, int]] = Counter()
        self._owed: deque[int] = deque()

    def add(self, kind: ActionKind, stage: int) -> None:
        """The action for the stage's next microbatch. A whole backward counts as a backward for input and weights."""
        key = (BACKWARD_INPUT if kind is BACKWARD else kind, stage)
        self.actions.append(Action(kind, stage, self._count[key]))
        self._count[key] += 1
        if kind is BACKWARD:
            self._count[BACKWARD_WEIGHT, stage] += 1
        elif kind is BACKWARD_INPUT:
            self._owed.append(stage)

    def count(self, kind: ActionKind, stage: int) -> int:
        """The number of actions of a kind so far."""
        return self._count[kind, stage]

    def add_owed_weight(self) -> bool:
        """The backward for weights that has waited longest. False if none waits."""
        if not self._owed:
            return False
        self.add(BACKWARD_WEIGHT, self._owed.popleft())
        return True


def exactly(count: int, schedule: str, stages_per_rank: int) -> Misfit | None:
    """The misfit of a schedule that takes exactly so many stages a rank."""
    if stages_per_rank == count:
        return None
    several = f"{count} stage{'s' if count > 1 else ''} a rank"
    message = f"{schedule} takes {several}, not {stages_per_rank}"
    return Misfit("stages_per_rank", message, f"set stages_per_rank to {count}")
