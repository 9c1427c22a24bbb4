"""The time of a pipeline's step against closed forms, and against parts and stages that are replayed one by one."""

from __future__ import annotations

import dataclasses

import pytest

from parallelizer.configuration.step_time import step_time
from parallelizer.language.pipeline.actions import ActionKind
from parallelizer.language.pipeline.settings import Pipeline, order_of
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.action_lines import Line, PipelineLines, RankLines, StandIn
from parallelizer.simulate.record.operators import Issued
from parallelizer.simulate.record.trace_classes import trace_classes
from parallelizer.simulate.time import predict_pipeline as module
from parallelizer.simulate.time.constants import Constants
from parallelizer.simulate.time.predict import StepTime
from parallelizer.simulate.time.predict_pipeline import BUBBLE, predict_pipeline
from tests.simulate.setups import llama
from tests.simulate.time.lines import collective, machine, memory

PLAIN = Constants(memory=1.0, contention=0.0, straggling=0.0)
SECOND = int(1e12)
SEND = 100_000_000_000
"""Bytes that a link inside a node takes a second for."""


def lines(
    ranks: int,
    microbatches: int,
    *,
    schedule: str = "1f1b",
    parts: int = 1,
    sends: int = 0,
    tail: int = 0,
    slow: int | None = None,
) -> PipelineLines:
    """A pipeline whose forwards take one second and whose backwards take two; `slow` is a stage that takes twice as long."""

    def action(seconds: int, phase: str, stage: int, to: int) -> Line:
        factor = 2 if stage == slow else 1
        computed = memory(factor * seconds * SECOND, phase)
        if not sends or not 0 <= to < ranks:
            return (computed,)
        return computed, Issued(collective("send", sends, "pp", phase, 2), False)

    by_stage = {
        stage: RankLines(
            {
                (part, kind, stage): 3 * (action(seconds, phase, stage, stage + step),)
                for part in range(min(parts, 3))
                for kind, seconds, phase, step in (
                    (ActionKind.FORWARD, 1, "forward", 1),
                    (ActionKind.BACKWARD, 2, "backward", -1),
                )
            },
            (memory(tail * SECOND, "optimizer"),) if tail else (),
        )
        for stage in range(ranks)
    }
    order = order_of(Pipeline(schedule, microbatches), ranks)
    return PipelineLines(order, parts, 0, by_stage, tuple(StandIn(stage) for stage in range(ranks)))


def predicted(given: PipelineLines, **changes: object) -> StepTime:
    return predict_pipeline(machine(**changes), given, Mesh({"pp": len(given.order)}), 64, constants=PLAIN)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_equal_stages_take_the_closed_form(schedule: str, ranks: int, microbatches: int) -> None:
    found = predicted(lines(ranks, microbatches, schedule=schedule))
    assert found.seconds == pytest.approx((microbatches + ranks - 1) * 3)
    assert found.waits == pytest.approx({BUBBLE: (ranks - 1) * 3})
    assert sum(found.compute.values()) == pytest.approx(microbatches * 3)


def test_the_slowest_stage_sets_the_pace() -> None:
    found = predicted(lines(2, 8, slow=1))
    # The first forward, then eight times six seconds on the slow stage, and the last backward.
    assert found.seconds == pytest.approx(1 + 8 * 6 + 2)


def test_messages_are_waited_for_apart_from_the_bubble_and_take_the_links_between_their_ranks() -> None:
    alone, sent = predicted(lines(2, 4)), predicted(lines(2, 4, sends=SEND // 4))
    assert sent.waits[BUBBLE] == pytest.approx(alone.waits[BUBBLE])
    assert sent.waits["pp"] == pytest.approx(sent.seconds - alone.seconds)
    assert sent.waits["pp"] > 0.25
    assert sent.links["pp"] == pytest.approx(4 * 0.25)  # rank 0 sends forward alone
    between_nodes = predicted(lines(2, 4, sends=SEND // 4), per_node=1)
    assert between_nodes.seconds > sent.seconds


def test_the_optimizer_comes_behind_the_last_action() -> None:
    assert predicted(lines(2, 4, tail=5)).seconds == pytest.approx(predicted(lines(2, 4)).seconds + 5)


@pytest.mark.parametrize("parts", [4, 7])
def test_accumulated_parts_that_are_not_replayed_take_what_one_takes(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = predicted(lines(3, 6, parts=parts, sends=SEND // 8))
    monkeypatch.setattr(module, "FEW", parts)
    every = predicted(lines(3, 6, parts=parts, sends=SEND // 8))
    assert few.seconds == pytest.approx(every.seconds)
    assert few.waits == pytest.approx(every.waits)
    assert few.compute == pytest.approx(every.compute)
    assert few.links == pytest.approx(every.links)
    assert few.flops == every.flops


def test_a_stage_that_was_not_traced_takes_its_share_of_the_time_of_one_that_was() -> None:
    given = lines(4, 8)
    stands = tuple(StandIn(1, 2.0) if stage == 2 else one for stage, one in enumerate(given.stand_ins))
    by_stage = {stage: one for stage, one in given.by_stage.items() if stage != 2}
    stood = dataclasses.replace(given, by_stage=by_stage, stand_ins=stands)
    assert predicted(stood).seconds == pytest.approx(predicted(lines(4, 8, slow=2)).seconds)


H100 = ("device=cuda", "hardware=h100", "model.n_layers=4", "train.batch_size=16", "train.seq_len=64")


def step(*overrides: str, rank: int = 0) -> StepTime:
    setup = llama(*overrides, *H100)
    model = setup.build_model()
    traced = trace_classes(setup.compile(model), model, setup.recipe(), rank)
    found = step_time(setup, traced)
    assert found is not None
    return found


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_the_parts_of_a_traced_step_add_up(schedule: str) -> None:
    found = step("parallel=pp2_fsdp2_tp2", f"parallel.pipeline.schedule={schedule}")
    assert sum(found.compute.values()) + sum(found.waits.values()) == pytest.approx(found.seconds, rel=0.02)
    assert {"pp", "tp", "dp_shard"} <= set(found.links)
    assert found.schedule is not None and found.schedule.length < found.seconds
    assert found.mfu is not None and found.mfu > 0


def test_stages_divide_the_operations_of_a_step_without_a_pipeline() -> None:
    """On one row at a time, products have the same sizes."""
    whole = step("parallel=single", "train.accumulate=16")
    cut = step("parallel=pp2", "parallel.pipeline.microbatches=16")
    assert 2 * cut.flops == whole.flops
    assert 2 * cut.whole_attention == whole.whole_attention
