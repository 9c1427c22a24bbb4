"""The rows of a table that compares pipeline schedules: how long ranks wait, and how many microbatches they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import ActionCosts, replay
from parallelizer.language.pipeline.settings import Pipeline, order_of


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule with its number of stages on each rank.

    `bubble` is the share of the ranks' time in which they wait. `live` is the largest number of microbatches that a rank
    holds at once: 1 is one microbatch on all layers of the rank. Both are None, with the reason in `misfit`, if the
    schedule cannot run these numbers.
    """

    name: str
    stages_per_rank: int
    bubble: float | None
    live: float | None
    misfit: str | None = None


def schedule_rows(
    ranks: int,
    microbatches: int,
    pipelines: Iterable[Pipeline] | None = None,
    durations: tuple[float, float, float] = (1, 1, 1),
) -> list[ScheduleRow]:
    """A row for each of the pipelines, or for each schedule of the table.

    `durations` are those of a forward, a backward for inputs and a backward for weights of one microbatch on all layers of
    a rank, in any unit. Stages are equal, and messages take no time.
    """
    rows = []
    for pipeline in pipelines or map(Pipeline, SCHEDULES):
        one = Pipeline(pipeline.schedule, microbatches, pipeline.stages_per_rank).settled(ranks)
        stages = one.stages_per_rank or 1
        wrong = one.misfit(ranks)
        if wrong is not None:
            rows.append(ScheduleRow(one.schedule, stages, None, None, wrong.message))
            continue
        costs = ActionCosts.equal(ranks * stages, *(duration / stages for duration in durations))
        found = replay(order_of(one, ranks), costs)
        live = max(map(found.peak, range(ranks))) / stages
        rows.append(ScheduleRow(one.schedule, stages, found.bubble, live))
    return rows


def rows_beside(pipeline: Pipeline, ranks: int) -> list[ScheduleRow]:
    """A row for each schedule of the table, with the microbatches of a pipeline; its own schedule has its stages."""
    pipelines = [
        Pipeline(name, stages_per_rank=pipeline.stages_per_rank if name == pipeline.schedule else None)
        for name in SCHEDULES
    ]
    return schedule_rows(ranks, pipeline.microbatches or 1, pipelines)
