"""The candidates of a search: every mesh of the GPUs once, and what is left out counted."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.space import CandidateCount, SpaceFacts, candidates, divisors
from parallelizer.propose.search.within import read_within

FACTS = SpaceFacts(
    gpus=16, batch=32, sequence=256, per_node=8, layers=8, cuts=True, context=True, tensor=True, stream=True
)


def _of(facts: SpaceFacts, *limits: str) -> tuple[list[Candidate], CandidateCount]:
    counted = CandidateCount()
    return list(candidates(facts, read_within(limits)[0], counted)), counted


def test_every_candidate_uses_all_gpus_and_the_whole_batch() -> None:
    found, _ = _of(FACTS)
    for one in found:
        assert one.mesh.world_size == 16
        assert one.data_ranks * one.rows * one.accumulate * one.microbatches == 32


def test_no_candidate_comes_twice_and_all_are_counted() -> None:
    found, counted = _of(FACTS)
    assert len(set(found)) == len(found)
    assert counted.total == len(found) + sum(counted.excluded.values())


def test_the_meshes_are_those_of_a_search_without_rules() -> None:
    facts = dataclasses.replace(FACTS, per_node=16, sequence=1024)
    found, _ = _of(facts, "rows=1..32", "pipeline.schedule=gpipe")
    sizes = divisors(16)
    every = {
        mesh
        for mesh in itertools.product(sizes, repeat=5)
        if mesh[0] * mesh[1] * mesh[2] * mesh[3] * mesh[4] == 16
        and mesh[0] <= 8
        # Replicas of parameters that cp alone shards are refused.
        and not (mesh[1] > 1 and mesh[2] == 1 and mesh[3] > 1)
    }
    assert {(c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp) for c in found} == every


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"per_node": 4}, "tp leaves the node"),
        ({"tensor": False}, "the plan has no tensor parallelism"),
        ({"context": False}, "the plan has no context parallelism"),
        ({"cuts": False}, "the plan allows no cut into stages"),
        ({"layers": 0}, "stages: the model has fewer than 3 equal layers to cut between"),
        ({"layers": 4}, "more stages than layers"),
        ({"sequence": 4}, "the sequence does not divide by cp"),
        ({"batch": 8}, "the batch does not divide by the data ranks"),
    ],
)
def test_what_is_ruled_out_is_counted_by_its_reason(changed: dict[str, object], reason: str) -> None:
    before, after = _of(FACTS)[1], _of(dataclasses.replace(FACTS, **changed))[1]  # type: ignore[arg-type]
    assert after.excluded[reason] > before.excluded[reason]


def test_a_fixed_size_leaves_only_meshes_with_it() -> None:
    found, _ = _of(FACTS, "mesh.tp=4", "mesh.pp=1")
    assert {(c.pp, c.tp) for c in found} == {(1, 4)}


def test_experts_are_shared_out_by_what_divides_them_and_a_replica() -> None:
    found, _ = _of(dataclasses.replace(FACTS, experts=12), "mesh.pp=1", "rows=2")
    by_mesh = {(c.mesh.replica, c.ep) for c in found}
    assert by_mesh == {
        (n, ep) for n in (1, 2, 4, 8, 16) for ep in (1, 2, 4) if n % ep == 0 and (n, ep) in by_mesh
    }


def test_a_class_with_experts_is_traced_on_two_shards_of_theirs() -> None:
    for ep in (1, 2, 4, 8):
        for tp in (1, 2, 4):
            key = Candidate(dp_shard=64, tp=tp, ep=ep).trace_class
            assert key == key.trace_class
            assert key.mesh.size_of("efsdp") >= 2 and key.dp_shard >= 2


def test_a_share_of_checkpoints_is_what_is_asked_for() -> None:
    def shares(*limits: str) -> set[float]:
        return {c.share for c in _of(FACTS, "checkpoint=full", "mesh.pp=1", *limits)[0]}

    assert shares() == {1.0}
    assert shares("checkpoint.share=0.25") == {0.25}
    assert shares("checkpoint.share=*") == {1.0, 0.75, 0.5, 0.25}
    assert shares("checkpoint.share=0.3..0.6") == {0.6, 0.5, 0.3}


def test_shares_of_the_same_number_of_layers_are_one_and_those_of_none_are_counted() -> None:
    facts = dataclasses.replace(FACTS, layers=3)
    found, _ = _of(facts, "checkpoint=full", "mesh.pp=1", "checkpoint.share=0.6,0.7,1")
    assert {c.share for c in found} == {1.0, 0.7}
    found, counted = _of(dataclasses.replace(FACTS, layers=0), "checkpoint=full", "checkpoint.share=0.5")
    assert not found
    assert counted.excluded["the share of the layers that are checkpointed is less than one layer"]


def test_a_pipeline_accumulates_where_a_limit_asks_for_it() -> None:
    found, _ = _of(FACTS, "mesh.pp=2", "accumulate=2", "rows=1")
    assert found and {c.accumulate for c in found} == {2}
    assert all(c.data_ranks * c.rows * c.accumulate * c.microbatches == FACTS.batch for c in found)
    assert {c.accumulate for c in _of(FACTS, "mesh.pp=2", "rows=1")[0]} == {1}


def test_a_balance_that_is_given_is_the_cut_of_every_candidate() -> None:
    found, counted = _of(dataclasses.replace(FACTS, balance=(3, 5)), "rows=1")
    assert found and {(c.pp * c.stages_per_rank, c.layers) for c in found} == {(2, (3, 5))}
    assert counted.excluded["not as many stages as the balance that is given has"]
