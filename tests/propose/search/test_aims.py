"""Searches for the fewest GPUs and for the least cost, with searches whose results are made up."""

from __future__ import annotations

import dataclasses
import io

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.propose.search import aims
from parallelizer.propose.search.aims import pursue
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.show import document, write_tried
from parallelizer.propose.search.task import SearchTask, read_task
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.simulate.time.predict import StepTime
from tests.propose.search.tasks import LLAMA


class _Search:
    """Finds a step of 8 s on one GPU, less on more of them, and nothing on fewer than 2."""

    def __init__(self, base: object, tell: object) -> None:
        pass

    def run(self, task: SearchTask) -> SearchResult:
        if task.gpus < 2:
            return SearchResult()
        seconds = 8 / task.gpus**0.5
        time = StepTime("H100", seconds, seconds, seconds, {}, {}, {}, {}, 1, 0, 0, 1e15, 4096, 4)
        return SearchResult(results=[TracedWhole(Candidate(dp_shard=task.gpus), 1, {}, time)])


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aims, "Search", _Search)


def _task(price: float | None, name: str = "H100") -> SearchTask:
    task = read_task([*LLAMA, "gpus=8"])
    hardware = {**task.base.hardware, "name": name, **({"price_per_hour": price} if price else {})}
    return dataclasses.replace(
        task,
        base=dataclasses.replace(task.base, hardware=hardware),
        machine=dataclasses.replace(task.machine, name=name),
    )


def test_for_memory_the_fewest_gpus_that_hold_the_step_are_searched() -> None:
    tried = pursue("memory", [_task(None)], lambda _: None)
    assert [one.task.gpus for one in tried] == [2, 1]
    stream = io.StringIO()
    write_tried(tried, "memory", stream, width=60)
    assert "cost" not in stream.getvalue() and "nothing fits or divides" in stream.getvalue()


def test_for_cost_kinds_and_numbers_of_gpus_are_compared() -> None:
    tried = pursue("cost", [_task(3.6, "dear"), _task(1.8, "cheap")], lambda _: None)
    best = tried[0]
    assert (best.task.machine.name, best.task.gpus) == ("cheap", 2)
    assert best.cost == pytest.approx(8 / 2**0.5 * 2 * 1.8 / 3600)
    costs = [one.cost for one in tried if one.found.results]
    assert costs == sorted(costs) and len(costs) == 6
    made = document(best.found, best.task, [], tried, "cost")
    assert made["tried"][0]["cost"] == best.cost and made["tried"][-1]["cost"] is None
    stream = io.StringIO()
    write_tried(tried, "cost", stream, width=60)
    assert max(map(len, stream.getvalue().splitlines())) <= 60 and "cheap" in stream.getvalue()


def test_for_time_only_all_gpus_are_searched() -> None:
    assert [one.task.gpus for one in pursue("time", [_task(None)], lambda _: None)] == [8]


def test_without_a_price_the_key_is_named() -> None:
    with pytest.raises(PlanError) as raised:
        pursue("cost", [_task(1.0), _task(None)], lambda _: None)
    assert "price_per_hour" in (raised.value.diagnostics[0].help or "")
