"""Which candidates are dry-run whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from parallelizer.propose.search import run
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.estimate import Estimate
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.truth import TracedWhole

RING = Candidate(dp_shard=4, cp=2, checkpoint="selective", method="ring")
GATHER = replace(RING, method="all-gather")
FULL = replace(RING, checkpoint="full")
PRICED = [
    Estimate(RING, 1.0, 98),
    Estimate(FULL, 2.0, 98),
    Estimate(GATHER, 3.0, 97),
    Estimate(replace(GATHER, rows=2), 4.0, 80),
]
"""On 100 bytes of memory, the fastest first."""


def _traced_whole(one: Candidate, peak: int) -> TracedWhole:
    return TracedWhole(one, peak, {}, SimpleNamespace(seconds=1.0))  # type: ignore[arg-type]


def _dry_run(
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
    priced: Sequence[Estimate] = PRICED,
    side_by_side: int = 1,
    asked: int = 2,
) -> SearchResult:
    """A search whose dry runs need `factor` times the estimate."""
    estimated = {one.candidate: one.peak for one in priced}

    @contextmanager
    def tracing(
        _: Any, __: Any, one: Candidate, *___: Any, **____: Any
    ) -> Iterator[Callable[[], TracedWhole]]:
        yield lambda: _traced_whole(one, round(factor * estimated[one]))

    monkeypatch.setattr(run, "tracing_whole", tracing)
    monkeypatch.setattr(run, "SIDE_BY_SIDE", side_by_side)
    search: Any = object.__new__(run.Search)
    search.found, search.refused, search.run_of_layers = SearchResult(priced=list(priced)), {}, None
    search.model, search.tell, search.preset = None, lambda _: None, lambda *_: ""
    search._trace_best(SimpleNamespace(memory=100, traced=10, asked=asked), None)
    return search.found


def test_what_is_too_large_if_its_estimate_errs_as_that_of_a_like_candidate_is_not_dry_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _dry_run(monkeypatch, 1.1)  # 108, 108, 107 and 88
    assert [one.candidate for one in found.too_large] == [
        RING,
        FULL,
    ]  # others under another checkpoint err otherwise
    assert [one.candidate for one in found.results] == [PRICED[3].candidate]
    assert sum(found.pruned.values()) == 1


def test_all_are_dry_run_where_estimates_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _dry_run(monkeypatch, 1.0)
    assert len(found.results) == len(PRICED) and not found.too_large and not sum(found.pruned.values())


def test_close_to_the_limit_a_dry_run_decides() -> None:
    estimated = {one.candidate: one.peak for one in PRICED}
    traced = [_traced_whole(RING, 101)]
    scaled = 99 * 101 / 98
    assert run.scaled_peak(PRICED[2], traced, estimated) <= 100
    assert run.scaled_peak(Estimate(GATHER, 3.0, 99), traced, estimated) == pytest.approx(scaled / 1.005)
    others = Estimate(replace(GATHER, rows=2), 3.0, 99)  # more than the method
    assert run.scaled_peak(others, traced, estimated) == pytest.approx(scaled / 1.02)
    split = Estimate(Candidate(dp_shard=2, cp=4, rows=2, checkpoint="selective"), 3.0, 99)  # as many tokens
    assert run.scaled_peak(split, traced, estimated) == pytest.approx(scaled / 1.01)
    fewer = Estimate(replace(split.candidate, rows=1), 3.0, 99)
    assert run.scaled_peak(fewer, traced, estimated) == 0
    assert run.scaled_peak(Estimate(replace(GATHER, pp=2), 3.0, 99), traced, estimated) == 0


def test_a_dry_run_that_fits_tells_of_a_like_candidate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    larger = Estimate(replace(RING, rows=2), 2.0, 105)
    found = _dry_run(monkeypatch, 1.0, [PRICED[0], larger])
    assert [one.candidate for one in found.results] == [RING] and not found.too_large
    found = _dry_run(monkeypatch, 0.95, [PRICED[0], larger])
    assert [one.candidate for one in found.results] == [RING, larger.candidate]


def _worth_it(some: Sequence[Candidate], peaks: Callable[[Candidate, float], float]) -> SearchResult:
    """The search whose estimated peaks are these, by candidate and part of the activations, after it took `some` on 100 bytes."""
    search: Any = object.__new__(run.Search)
    search.found = SearchResult()
    search._least = lambda *_: lambda _: 0.0
    estimates: Any = SimpleNamespace(knows=lambda _: True, peak=lambda one, part=1.0: peaks(one, part))
    search.left = search._worth_it(some, estimates, SimpleNamespace(memory=100))
    return search


@pytest.mark.parametrize(
    ("rows", "part"), [(4, 1.0), (8, 1.0), (2, 0.5), (1, 0.25)]
)  # of the tokens of the rows of whole sequences
def test_cp_with_as_many_tokens_as_do_not_fit_whole_is_not_priced(rows: int, part: float) -> None:
    one = Candidate(dp_shard=4, cp=4, rows=rows, accumulate=8)
    search: Any = _worth_it([one], lambda _, at: 111 if at == part else 0 if at == 0.25 else 99)
    assert not search.left and sum(search.found.pruned.values()) == 1
    search = _worth_it([one], lambda _, at: 95 if at < 1 or part == 1 else 120)
    assert search.left == [one]


def test_what_is_too_large_by_estimate_waits_for_a_like_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = [Estimate(RING, 1.0, 105), Estimate(GATHER, 2.0, 104)]
    found = _dry_run(monkeypatch, 1.0, priced, side_by_side=2)
    assert [one.candidate for one in found.too_large] == [RING]


@pytest.mark.parametrize("asked", [2, 3, 4])
@pytest.mark.parametrize("side_by_side", [1, 2])
def test_as_many_are_dry_run_as_are_asked_for_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, side_by_side: int, asked: int
) -> None:
    monkeypatch.setattr(run, "EFFORT", 0)
    found = _dry_run(monkeypatch, 0.5, side_by_side=side_by_side, asked=asked)
    assert [one.candidate for one in found.results] == [one.candidate for one in PRICED[:asked]]
