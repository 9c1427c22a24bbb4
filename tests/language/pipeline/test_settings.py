"""The settings of a pipeline, and the order that follows from them."""

from __future__ import annotations

import pytest

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.settings import Pipeline, order_of, stage_rank
from tests.language.pipeline.torch_orders import torch_order


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1f1b"])
def test_defaults_are_two_microbatches_a_rank_and_the_schedules_own_number_of_stages(name: str) -> None:
    stages = SCHEDULES[name].stages_per_rank
    assert order_of(Pipeline(name), 4) == torch_order(name, 4, stages, 8)
    settled = Pipeline(name).settled(4)
    assert (settled.microbatches, settled.stages_per_rank) == (8, stages)


def test_the_rank_of_each_stage() -> None:
    assert stage_rank(Pipeline("interleaved-1f1b", 4, 3), 2) == (0, 1, 0, 1, 0, 1)
    assert stage_rank(Pipeline("zbv"), 3) == (0, 1, 2, 2, 1, 0)


def test_an_order_of_its_own_replaces_the_schedule_and_its_numbers() -> None:
    order = torch_order("dualpipev", 2, 2, 5)
    pipeline = Pipeline("gpipe", csv="mine.csv", order=order)
    assert order_of(pipeline, 2) == order
    settled = pipeline.settled(2)
    assert (settled.microbatches, settled.stages_per_rank) == (5, 2)
    with pytest.raises(ValueError, match=r"mine.csv has an order for 2 ranks, not 4"):
        order_of(pipeline, 4)


def test_numbers_that_the_schedule_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match="3 equal rounds: set microbatches to 12 or 15"):
        order_of(Pipeline("interleaved-1f1b", 13), 4)
    with pytest.raises(ValueError, match="takes 2 stages a rank, not 3"):
        order_of(Pipeline("zbv", 8, 3), 4)
    with pytest.raises(ValueError, match="there is no schedule 'zbw'"):
        order_of(Pipeline("zbw"), 4)
