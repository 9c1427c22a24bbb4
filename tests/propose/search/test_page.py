"""The page of a search: the front, and a plot in which every traced candidate has its place."""

from __future__ import annotations

import re
from collections import Counter

from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.page import front, page
from parallelizer.propose.search.task import read_task
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.simulate.time.predict import StepTime
from tests.propose.search.tasks import LLAMA

GIB = 2**30


def _traced(seconds: float, gib: float, rows: int = 1) -> TracedWhole:
    time = StepTime("H100", seconds, seconds, seconds, {"gemm": seconds}, {}, {}, {}, 1, 0, 0, 1e15, 4096, 4)
    return TracedWhole(Candidate(dp_shard=4, rows=rows), int(gib * GIB), {"parameters": GIB}, time)


def test_the_front_holds_what_no_other_beats_in_both() -> None:
    small, middle, fast, beaten = _traced(4, 1), _traced(3, 2), _traced(1, 9), _traced(3.5, 3)
    assert front([fast, beaten, small, middle]) == [small, middle, fast]


def test_every_traced_candidate_is_a_point_and_has_its_preset() -> None:
    task = read_task([*LLAMA, "gpus=4"], memory=10 * GIB)
    found = SearchResult(
        total=5,
        excluded=Counter({"tp leaves the node <8>": 2}),
        results=[_traced(1, 9), _traced(2, 4, rows=2)],
        too_large=[_traced(0.5, 12, rows=4)],
    )
    text = page(found, task, ["mesh: {dp_shard: 4}\n", "mesh: {tp: 4}\n"])
    assert len(re.findall(r'class="fits"', text)) == 2 and len(re.findall(r'class="large"', text)) == 1
    assert text.count("<details") == 2 and "mesh: {tp: 4}" in text
    for at in range(2):  # a point leads to its preset
        assert f'href="#result-{at}"' in text and f'id="result-{at}"' in text
    assert "tp leaves the node &lt;8&gt;" in text
    assert "<script" not in text
