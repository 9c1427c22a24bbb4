"""The closed forms of a pipeline: its cut, its least time, and what its ranks hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.class_trace import WEIGHTS, ClassTrace, Spot
from parallelizer.propose.search.layer_times import UnitBytes
from parallelizer.propose.search.stages import (
    StageTimes,
    cut_layers,
    least_seconds,
    pipeline_seconds,
    rank_peaks,
)

SECONDS = st.floats(0.1, 10)
UNITS = UnitBytes((24, 24, 48), (2, 1, 4))
USE = {"parameters": 100, "optimizer": 200, "buffers": 1, "batch": 2, "activations": 300, "temporaries": 60,
       "collectives": 0, "received": 0, WEIGHTS: 90}  # fmt: skip


def traced(**use: int) -> ClassTrace:
    """A class of a model with eight layers, whose moments hold the same but for `use` in backward."""
    spots = (Spot("before", 0.0, USE), Spot("backward", 1.0, {**USE, **use}))
    return ClassTrace((), 1, 8, 2, None, 8, (50, 20), spots, layer=90)


@st.composite
def pipelines(draw: st.DrawFn) -> Candidate:
    """Pipelines by every schedule, with one to four layers a stage."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(2, 4))
    each = draw(st.sampled_from((1, 2)))
    microbatches = draw(st.integers(2, 12))
    assume(SCHEDULES[name].misfit(pp, each, microbatches) is None)
    stages = pp * each
    layers = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    return Candidate(
        pp=pp, dp_shard=2, schedule=name, stages_per_rank=each, microbatches=microbatches, layers=tuple(layers),
        accumulate=draw(st.sampled_from((1, 2))),
    )  # fmt: skip


@given(pipelines(), st.data())
def test_the_peaks_of_some_ranks_are_those_among_all(cut: Candidate, data: st.DataObject) -> None:
    every = rank_peaks(cut, traced(), UNITS, 7, range(cut.pp))
    some = data.draw(st.lists(st.sampled_from(range(cut.pp)), min_size=1))
    assert rank_peaks(cut, traced(), UNITS, 7, some) == [every[rank] for rank in some]


@given(pipelines())
def test_a_rank_holds_what_the_larger_half_of_a_backward_needs_not_both(cut: Candidate) -> None:
    def peaks(temporaries: int, weights: int) -> list[int]:
        return rank_peaks(
            cut, traced(**{"temporaries": temporaries, WEIGHTS: weights}), UNITS, 7, range(cut.pp)
        )

    work = traced(temporaries=500).workspace[0]
    assert peaks(500, 0) == peaks(500, work)
    more = zip(peaks(500, work + 1000), peaks(500, 0), strict=True)
    assert all(a - b <= 1001 for a, b in more)  # rounded


@given(pipelines(), st.data())
@settings(deadline=None)
def test_the_least_seconds_are_no_more_than_those_of_the_replay(cut: Candidate, data: st.DataObject) -> None:
    stages = [StageTimes(data.draw(SECONDS), data.draw(SECONDS)) for _ in cut.layers]
    nothing = [0.0] * len(stages)
    least = least_seconds(cut, stages, nothing, nothing)
    assert least <= pipeline_seconds(cut, stages, nothing, nothing, message=0.0) * (1 + 1e-9)


@given(st.integers(2, 3), st.integers(0, 4), SECONDS, SECONDS, SECONDS)
def test_no_other_cut_has_a_faster_slowest_stage(
    stages: int, more: int, layer: float, first: float, last: float
) -> None:
    def slowest(cut: tuple[int, ...]) -> float:
        ends = [first, *[0.0] * (stages - 2), last]
        return max(n * layer + e for n, e in zip(cut, ends, strict=True))

    layers = stages + more
    cut = cut_layers(layers, stages, layer, first, last)
    others = (c for c in itertools.product(range(1, layers), repeat=stages) if sum(c) == layers)
    assert sum(cut) == layers and min(cut) >= 1
    assert slowest(cut) <= min(map(slowest, others)) * (1 + 1e-9)


def test_more_rows_hold_more() -> None:
    cut = Candidate(pp=2, dp_shard=2, rows=2, schedule="1f1b", microbatches=4, layers=(4, 4))
    more = rank_peaks(replace(cut, rows=4), traced(), UNITS, 7, range(2))
    assert all(a > b for a, b in zip(more, rank_peaks(cut, traced(), UNITS, 7, range(2)), strict=True))
