"""Classes that recompute, derived from one that was traced so: their times and their memory are those of a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelizer.propose.search.candidate import FULL, NO_CHECKPOINT, SELECTIVE, Candidate
from parallelizer.propose.search.classes import TracedClasses
from parallelizer.propose.search.estimate import SURE, Estimates
from parallelizer.propose.search.task import SearchTask, read_task
from parallelizer.simulate.record.operators import Issued, Wait

SMALL = (
    "hardware=h100", "gpus=8", "train.seq_len=512", "model.dim=256", "model.hidden_dim=512", "model.n_heads=4",
    "model.n_kv_heads=4", "model.max_seq_len=512", "model.n_layers=8", "train.batch_size=32",
)  # fmt: skip
EXPERTS = ("model=hf_qwen3_moe", "hardware=h100", "gpus=8", "train.seq_len=136", "train.batch_size=32",
           "++model.config.num_hidden_layers=8")  # fmt: skip


def _classes(*overrides: str) -> tuple[TracedClasses, SearchTask]:
    task = read_task(overrides)
    return TracedClasses(task.base, lambda _: None), task


def _compared(classes: TracedClasses, task: SearchTask, one: Candidate) -> None:
    """Compare a derived class with its trace."""
    key = one.trace_class
    derived = Estimates(task.machine, dict(classes.traces))
    made_by_derivation = classes.traces.pop(key)
    classes._trace([key])
    traced = Estimates(task.machine, dict(classes.traces))
    classes.traces[key] = made_by_derivation
    for rows in (1, 4):
        candidate = replace(one, dp_shard=8 // one.tp // one.cp, rows=rows)
        made, real = derived.of(candidate), traced.of(candidate)
        assert made.seconds == pytest.approx(real.seconds, rel=0.03)
        assert made.peak == pytest.approx(real.peak, rel=SURE - 1)


@pytest.fixture(scope="module")
def over_tp() -> tuple[TracedClasses, SearchTask]:
    """The classes of tp=2 and tp=4 with and without recomputation, the last of which is derived."""
    classes, task = _classes(*SMALL)
    classes.trace([Candidate(tp=tp, checkpoint=FULL).trace_class for tp in (2, 4)])
    assert len(classes.traces) == 4 and classes.count == 3
    return classes, task


def test_a_class_that_recomputes_is_derived_from_another(over_tp: tuple[TracedClasses, SearchTask]) -> None:
    _compared(*over_tp, Candidate(tp=4, checkpoint=FULL))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FULL, SELECTIVE])
@pytest.mark.parametrize(
    ("overrides", "first", "second"),
    [
        (SMALL, Candidate(tp=2), Candidate(tp=4)),
        (SMALL, Candidate(), Candidate(cp=2)),
        (SMALL, Candidate(tp=2), Candidate(tp=2, cp=2)),
        (EXPERTS, Candidate(ep=2), Candidate(ep=4)),
        (EXPERTS, Candidate(ep=2, tp=2), Candidate(ep=4, tp=2)),
    ],
    ids=["tp", "cp", "cp with tp", "ep", "ep with tp"],
)
def test_modes_of_other_sizes_are_those_of_a_trace(
    overrides: tuple[str, ...], first: Candidate, second: Candidate, mode: str
) -> None:
    classes, task = _classes(*overrides)
    one, other = (replace(c, checkpoint=mode) for c in (first, second))
    classes.trace([one.trace_class, other.trace_class])
    assert classes.count == 3  # the first with and without the mode, the second without
    _compared(classes, task, other)


def test_waits_of_a_derived_class_are_for_collectives_of_their_axis(
    over_tp: tuple[TracedClasses, SearchTask],
) -> None:
    for traced in over_tp[0].traces.values():
        issued: list[Issued] = []
        for moment in traced.line:
            if isinstance(moment, Issued):
                issued.append(moment)
            if isinstance(moment, Wait):
                assert issued[-moment.back].phase in ("forward", moment.phase)
                assert not issued[-moment.back].unit


def test_no_estimate_is_below_what_a_class_with_fewer_ranks_of_tp_says(
    over_tp: tuple[TracedClasses, SearchTask],
) -> None:
    classes, task = over_tp
    fewer = Estimates(task.machine, {key: one for key, one in classes.traces.items() if key.tp == 2})
    every = Estimates(task.machine, classes.traces)
    for checkpoint in (NO_CHECKPOINT, FULL):
        for one in (
            Candidate(dp_shard=2, tp=4, rows=4, accumulate=4, checkpoint=checkpoint),
            Candidate(pp=2, tp=4, rows=2, microbatches=16, schedule="1f1b", checkpoint=checkpoint),
        ):
            assert 0 < fewer.floor(one) <= every.least(one)
    assert fewer.floor(Candidate(dp_shard=8)) == 0.0
