"""The reasons of a search in words."""

from __future__ import annotations

import dataclasses

from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.reasons import loses
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.simulate.time.predict import StepTime

BEST = TracedWhole(
    Candidate(dp_shard=4), 1, {}, StepTime("H100", 1, 1, 1, {"gemm": 1.0}, {}, {}, {}, 1, 0, 0, 1e15, 4096, 4)
)


def _slower(**changed: object) -> TracedWhole:
    time = dataclasses.replace(BEST.time, seconds=1.2, **changed)  # type: ignore[arg-type]
    return dataclasses.replace(BEST, time=time)


def test_what_a_slower_candidate_has_more_of_is_named_whatever_its_name() -> None:
    assert loses(BEST, _slower(compute={"gemm": 1.0, "memory": 0.2})) == "+20.0%, more elementwise"
    assert loses(BEST, _slower(waits={"tp": 0.2})) == "+20.0%, more waiting for tp"


def test_what_a_slower_candidate_has_less_of_is_no_reason() -> None:
    other = _slower(compute={"gemm": 0.2}, waits={"tp": 0.5, "cp": 0.5})
    assert loses(BEST, other) == "+20.0%, more waiting for tp"


def test_an_equal_candidate_is_as_fast() -> None:
    assert loses(BEST, BEST) == "as fast"
