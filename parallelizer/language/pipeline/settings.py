"""What a preset's key `pipeline` says, and the order of actions that follows from it on a number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.pipeline.actions import Order, microbatch_count, stage_ranks
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.schedule import Misfit, Schedule

BALANCES = {
    "layers": "the same number of layers on every stage, where what runs before the first and after the last counts as one each",
    "parameters": "the same number of parameters",
    "memory": "the same memory, estimated: states of local parameters, and activations of the microbatches that a stage holds",
    "time": "the same time of computation",
}
"""What the cut of the model into stages makes equal."""

ORDERS = 4
"""Orders that are kept: one with many microbatches takes seconds to make, and has an object for every action."""


@dataclass(frozen=True)
class Pipeline:
    """The settings of the pipeline.

    `microbatches` is the number of parts that a data rank's rows of an optimizer step, or of an accumulated part of it,
    are cut into; None stands for 2 x ranks. `stages_per_rank` None stands for the schedule's own number. `balance` is
    a word of `BALANCES`, or the number of layers of each stage. `csv` is a file that `order` was read from; the two
    replace `schedule`. `spans` has the places where the keys were set.
    """

    schedule: str = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    balance: str | tuple[int, ...] = "parameters"
    csv: str | None = None
    order: Order | None = field(default=None, repr=False)
    spans: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)

    @property
    def kind(self) -> Schedule:
        """The schedule's entry in the table. Raises ValueError for an unknown name."""
        if self.schedule not in SCHEDULES:
            raise ValueError(f"there is no schedule {self.schedule!r}: there are {', '.join(SCHEDULES)}")
        return SCHEDULES[self.schedule]

    def settled(self, ranks: int) -> Pipeline:
        """These settings with every number filled in, for `ranks` ranks on the axis pp. Raises ValueError for an unknown
        schedule or balance.
        """
        if isinstance(self.balance, str) and self.balance not in BALANCES:
            raise ValueError(f"there is no balance {self.balance!r}: there are {', '.join(BALANCES)}")
        if self.order is not None:
            stages = len(stage_ranks(self.order))
            return replace(
                self, microbatches=microbatch_count(self.order), stages_per_rank=stages // len(self.order)
            )
        return replace(
            self,
            microbatches=self.microbatches if self.microbatches is not None else 2 * ranks,
            stages_per_rank=self.stages_per_rank or self.kind.stages_per_rank,
        )

    def misfit(self, ranks: int) -> Misfit | None:
        """Why the schedule cannot run these numbers on so many ranks; None if it can."""
        if self.order is not None:
            return None
        stages, microbatches = _numbers(self, ranks)
        return self.kind.misfit(ranks, stages, microbatches)


def order_of(pipeline: Pipeline, ranks: int) -> Order:
    """The actions of each rank of the axis pp. Raises ValueError for numbers that the schedule cannot run."""
    if pipeline.order is not None:
        if len(pipeline.order) != ranks:
            raise ValueError(f"{pipeline.csv} has an order for {len(pipeline.order)} ranks, not {ranks}")
        return pipeline.order
    wrong = pipeline.misfit(ranks)
    if wrong is not None:
        raise ValueError(f"{wrong.message}: {wrong.help}")
    return _order(pipeline.schedule, ranks, *_numbers(pipeline, ranks))


def stage_rank(pipeline: Pipeline, ranks: int) -> tuple[int, ...]:
    """The rank on the axis pp of each stage. Raises ValueError as `order_of`."""
    if pipeline.order is not None or pipeline.misfit(ranks) is not None:
        return stage_ranks(order_of(pipeline, ranks))
    # An order of many microbatches takes seconds, and says no more of this.
    stages, _ = _numbers(pipeline, ranks)
    return tuple(pipeline.kind.rank_of(stage, ranks) for stage in range(stages * ranks))


@functools.lru_cache(ORDERS)
def _order(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Order:
    return SCHEDULES[schedule].order(ranks, stages_per_rank, microbatches)


def _numbers(pipeline: Pipeline, ranks: int) -> tuple[int, int]:
    settled = pipeline.settled(ranks)
    return settled.stages_per_rank or 1, settled.microbatches or 1
