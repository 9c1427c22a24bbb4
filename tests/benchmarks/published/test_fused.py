"""Lines as they are on Megatron's stack."""

from __future__ import annotations

import dataclasses

from benchmarks.published.fused import fused_parts, fused_pipeline, pipeline_with_rows_in_place
from parallelizer.language.pipeline.actions import ActionKind
from parallelizer.simulate.record.action_lines import PipelineLines, RankLines, StandIn
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.operators import Issued, Moment, Operator, Wait


def memory(name: str, moved: int, module: str = "layers.0.w", phase: str = "backward") -> Operator:
    return Operator(phase, module, "memory", name, "bfloat16", moved)


PRODUCT = Operator("backward", "layers.0.w", "gemm", "mm", "bfloat16", 100, (1, 8, 8, 8))


def test_adding_to_a_gradient_costs_nothing_and_everything_else_what_it_did() -> None:
    first = [memory("chain", 10), PRODUCT, memory("gelu", 7)]
    later = [
        memory("chain", 40),
        PRODUCT,
        memory("add_", 30),
        memory("gelu", 7),
        memory("chain", 5, "layers.1"),
    ]
    assert fused_parts([first, later]) == [first, first]


def test_a_sum_in_forward_stays() -> None:
    line: list[Moment] = [memory("add", 3, phase="forward")]
    assert fused_parts([[], line]) == [[], line]


def test_copies_around_collectives_go() -> None:
    assert fused_parts([[memory("cat", 3, phase="forward"), PRODUCT]]) == [[PRODUCT]]


def test_parameters_of_later_stages_of_a_rank_are_gathered_beside_the_computation() -> None:
    gather = Issued(
        Collective("forward", "all_gather", "dp_shard", 2, 8, 4, "bfloat16", "layers.0", None, False),
        True,
        False,
    )
    over_tp = Issued(
        Collective("forward", "all_gather", "tp", 2, 8, 4, "bfloat16", "layers.0", None, False), False, True
    )
    waits = [Wait("forward", "layers.0", back) for back in (1, 2)]
    line: tuple[Moment, ...] = (over_tp, gather, *waits)
    actions = {(0, ActionKind.FORWARD, stage): (line,) for stage in (1, 3)}
    rank = RankLines(actions, line)
    found = fused_pipeline(PipelineLines((), 1, 1, {1: rank, 3: rank}, (StandIn(1),) * 4)).by_stage
    assert found[1] is found[3]
    assert found[1].actions == {
        (0, ActionKind.FORWARD, 1): (line,),
        (0, ActionKind.FORWARD, 3): ((over_tp, waits[0]),),
    }
    assert found[1].tail == line


def test_rows_of_experts_are_moved_by_the_kernels_that_send_them() -> None:
    """What stays are products, the activation, and whatever lies beside the experts."""
    product = dataclasses.replace(PRODUCT, module="layers.0.mlp.experts")
    moved = memory("chain", 9, "layers.0.mlp.experts")
    kept = [
        product,
        memory("silu", 3, "layers.0.mlp.experts.act_fn"),
        memory("chain", 2, "layers.0.mlp.gate"),
    ]
    actions = {(0, ActionKind.FORWARD, 0): ((moved, *kept, moved),)}
    rank = RankLines(actions, (moved,), {(0, ActionKind.FORWARD, 0): (7,)})
    found = pipeline_with_rows_in_place(PipelineLines((), 1, 0, {0: rank}, (StandIn(0),))).by_stage[0]
    assert found.actions == {(0, ActionKind.FORWARD, 0): (tuple(kept),)}
    assert found.tail == (moved,) and found.times == rank.times
