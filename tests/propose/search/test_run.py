"""The search against an exhaustive one: the dry run of every candidate of the same space."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parallelizer.configuration.step_time import step_time
from parallelizer.propose.search.bounds import best_rate, flops_of_batch, memory_bound, time_bound
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.reasons import binds, comments, loses
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.space import CandidateCount, candidates
from parallelizer.propose.search.task import SearchTask, read_task
from parallelizer.propose.search.truth import TracedWhole, trace_whole
from parallelizer.simulate.record.trace_classes import trace_classes, worst
from tests.propose.search.tasks import LLAMA

WIDE = ("model.dim=512", "model.hidden_dim=1536", "model.n_heads=8", "model.n_kv_heads=8", "train.seq_len=512",
        "model.max_seq_len=512", "train.batch_size=16")  # fmt: skip
"""Wide enough for products to take longer than the host."""


def _every(search: Search, task: SearchTask) -> list[TracedWhole]:
    """All candidates, traced whole."""
    found: list[TracedWhole] = []
    for one in candidates(search.facts(task), task.within, CandidateCount()):
        traced = trace_whole(task, search.model, one, search.preset(task, one))
        if isinstance(traced, TracedWhole):
            found.append(traced)
    return found


def _search(
    overrides: Sequence[str], within: Sequence[str], memory: int = 70 * 2**30
) -> tuple[Search, SearchTask]:
    task = read_task([*LLAMA, *overrides], within=within, memory=memory)
    return Search(task.base, lambda _: None), task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "within"),
    [
        (["gpus=2"], ["mesh.tp=1..2", "mesh.cp=1", "mesh.pp=1", "mesh.dp_replicate=1", "rows=2", "checkpoint=none,full"]),
        (["gpus=4", *WIDE], ["mesh.pp=1..2", "mesh.cp=1", "mesh.dp_replicate=1", "mesh.tp=1..2", "checkpoint=none"]),
        (["gpus=4", *WIDE], ["mesh.pp=1", "checkpoint=none", "rows=1..2", "mesh.dp_replicate=1"]),
    ],
    ids=["tp", "pp", "cp"],
)  # fmt: skip
def test_the_best_is_within_three_percent_of_the_exhaustive_search(
    overrides: list[str], within: list[str]
) -> None:
    search, task = _search(overrides, within)
    found = search.run(task)
    every = _every(search, task)
    best = min(one.seconds for one in every if one.peak <= task.memory)
    assert best <= found.results[0].seconds <= 1.03 * best
    key, traced = next(iter(search.classes.traces.items()))
    flops = flops_of_batch(traced, key, task.base.workload.batch_size)
    for one in every:
        assert memory_bound(one.candidate, search.states) <= one.peak
        assert 0 < time_bound(one.candidate, flops, best_rate(task.machine)) <= one.seconds


@pytest.mark.slow
def test_a_pipeline_that_accumulates_takes_what_is_estimated() -> None:
    search, task = _search(
        ["gpus=2", *WIDE],
        ["mesh.pp=2", "accumulate=2", "rows=1", "checkpoint=none", "pipeline.schedule=1f1b"],
    )
    found = search.run(task)
    assert found.results and {one.candidate.accumulate for one in found.results} == {2}
    prices = {one.candidate: one.seconds for one in found.priced}
    for one in found.results:
        assert one.seconds == pytest.approx(prices[one.candidate], rel=0.2)  # one part would be half of it


@pytest.mark.slow
def test_a_limit_of_memory_leaves_out_what_does_not_fit_and_the_reasons_say_so() -> None:
    limits = ["mesh.tp=1", "mesh.cp=1", "mesh.pp=1", "mesh.dp_replicate=1", "rows=2", "checkpoint=none,full"]
    search, task = _search(["gpus=2"], limits)
    best = search.run(task).results[0]
    search, task = _search(["gpus=2"], limits, memory=best.peak - 1)
    found = search.run(task)
    assert all(one.peak < best.peak for one in found.results)
    assert best.candidate in [one.candidate for one in found.too_large]
    assert any(reason.startswith("memory: ") for reason in binds(found, task))
    assert all(loses(found.results[0], one) for one in found.results[1:])


@pytest.mark.parametrize(
    ("gpus", "within"),
    [
        (2, ["mesh.tp=2", "rows=4", "checkpoint=none"]),
        pytest.param(
            4,
            ["mesh.tp=1..2", "mesh.cp=1", "mesh.dp_replicate=1", "rows=2", "checkpoint=none,full"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_found_preset_has_the_time_and_the_memory_that_plan_prints(gpus: int, within: list[str]) -> None:
    search, task = _search([f"gpus={gpus}", f"model.n_layers={gpus}"], within)
    found = search.run(task)
    assert found.results
    for place, one in enumerate(found.results[:2]):
        setup = task.setup_of(
            search.preset(task, one.candidate, comments(found, task, place, "search")), one.candidate
        )
        step = trace_classes(setup.compile(search.model), search.model, setup.recipe())
        time = step_time(setup, step)
        assert worst(step)[0] == one.peak
        assert time is not None and time.seconds == one.seconds


@pytest.mark.parametrize(
    ("options", "method"),
    [((), "all-gather"), (("+parallel.styles.context-parallel.method=ring",), "ring")],
)
def test_the_method_that_a_candidate_has_anyway_is_known(options: tuple[str, ...], method: str) -> None:
    search, task = _search(["gpus=2", *options], [])
    assert search.facts(task).method == method  # which is not tried beside it


def test_ctrl_c_leaves_what_is_known() -> None:
    def interrupted(text: str) -> None:
        if text.startswith("dry run 3"):  # the second is on its way
            raise KeyboardInterrupt

    task = read_task(
        [*LLAMA, "gpus=4", "model.n_layers=2"],
        within=["mesh.cp=1", "rows=1,2", "checkpoint=none", "mesh.tp=1", "mesh.dp_shard=4"],
    )
    found = Search(task.base, interrupted).run(task)
    assert not found.complete and len(found.results) == 1


@pytest.mark.slow
def test_two_searches_find_the_same() -> None:
    limits = ["mesh.cp=1", "mesh.pp=1", "rows=2", "checkpoint=none", "mesh.dp_replicate=1"]

    def results() -> list[tuple[Candidate, float, int]]:
        search, task = _search(["gpus=2"], limits)
        return [(one.candidate, one.seconds, one.peak) for one in search.run(task).results]

    assert results() == results()
