"""Candidates beside the best, and the cut of layers that levels memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.refine import refined
from parallelizer.propose.search.space import SpaceFacts
from parallelizer.propose.search.stages import level_layers
from parallelizer.propose.search.within import read_within

FACTS = SpaceFacts(
    gpus=16, batch=32, sequence=256, per_node=8, layers=8, cuts=True, context=True, tensor=True, stream=True
)
FREE = read_within([])[0]


def test_the_best_with_checkpoints_is_tried_with_fewer() -> None:
    full = Candidate(dp_shard=16, checkpoint="full")
    found = list(refined([Candidate(dp_shard=16), full], FACTS, FREE))
    assert found == [dataclasses.replace(full, share=share) for share in (0.75, 0.5, 0.25)]
    assert not list(refined([full], FACTS, read_within(["checkpoint.share=1"])[0]))


def test_only_the_fastest_with_an_axis_is_tried_with_other_streams_and_methods() -> None:
    best = [Candidate(dp_shard=4, tp=4), Candidate(dp_shard=2, tp=8), Candidate(dp_shard=8, cp=2)]
    found = list(refined(best, FACTS, FREE))
    assert [one for one in found if one.stream == "whole"] == [dataclasses.replace(best[0], stream="whole")]
    assert {(one.cp, one.method) for one in found if one.method} == {
        (2, method) for method in ("all-gather", "ring", "ulysses")
    }
    named = dataclasses.replace(FACTS, method="ring")
    assert "ring" not in {one.method for one in refined(best, named, FREE)}


def test_ulysses_ring_is_tried_only_where_it_is_neither_ring_nor_ulysses() -> None:
    def methods(cp: int) -> set[str]:
        return {one.method for one in refined([Candidate(dp_shard=2, cp=cp)], FACTS, FREE)}

    assert "ulysses-ring" in methods(4) and "ulysses-ring" in methods(6)
    assert methods(2) == methods(3) == methods(4) - {"ulysses-ring"}


def test_layers_move_from_the_fullest_rank_to_the_emptiest() -> None:
    cut = Candidate(pp=4, schedule="1f1b", microbatches=8, layers=(4, 4, 4, 4))
    each = (4, 3, 2, 1)  # what is in flight: the first rank holds most

    def peaks(one: Candidate, ranks: Sequence[int] = range(4)) -> list[int]:
        return [one.layers[rank] * each[rank] for rank in ranks]

    level = level_layers(cut, peaks)
    assert sum(level) == 16 and min(level) >= 1
    assert max(peaks(dataclasses.replace(cut, layers=level))) < max(peaks(cut))
    assert level_layers(dataclasses.replace(cut, layers=(1, 1, 1, 1)), peaks) == (1, 1, 1, 1)
