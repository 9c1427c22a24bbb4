"""The picture of a search is a file of its own with every point."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.search.picture import CASE, drawn
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.task import read_task
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.simulate.time.predict import StepTime
from tests.propose.search.tasks import LLAMA

DOCS = Path(__file__).resolve().parents[3] / "docs"


def _classes(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return [one.get("class", "") for one in root.iter() if one.tag.endswith("circle")]


def test_a_drawn_search_has_a_point_for_each_dry_run() -> None:
    def traced(seconds: float, peak: int) -> TracedWhole:
        time = StepTime(
            "H100", seconds, seconds, seconds, {"gemm": seconds}, {}, {}, {}, 1, 0, 0, 1e15, 4096, 4
        )
        return TracedWhole(Candidate(dp_shard=4), peak, {}, time)

    task = read_task([*LLAMA, "gpus=4"], memory=100)
    found = SearchResult(results=[traced(1, 90), traced(2, 40)], too_large=[traced(0.5, 120)])
    assert sorted(_classes(drawn(found, task))) == ["fits", "fits", "large"]


def test_the_picture_of_the_page_is_of_the_search_that_the_page_begins_with() -> None:
    text, picture = (DOCS / "search.md").read_text(), DOCS / "pictures" / "search.svg"
    assert " ".join(CASE) in text
    assert ("](pictures/search.svg)" in text) == picture.exists()
    assert not picture.exists() or "fits" in _classes(picture.read_text())
