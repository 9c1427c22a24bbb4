"""What `search` prints."""

from __future__ import annotations

import io
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.show import _amount, write_found
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.simulate.time.predict import StepTime


def _shown(found: SearchResult, memory: int, width: int = 60) -> list[str]:
    base = SimpleNamespace(
        workload=SimpleNamespace(batch_size=1024, seq_len=8192), hardware={"memory_gib": 80}
    )
    task: Any = SimpleNamespace(gpus=1024, machine=SimpleNamespace(name="H100-SXM"), memory=memory, base=base)
    stream = io.StringIO()
    write_found(found, task, stream, top=5, width=width)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 100])
def test_lines_fit_the_width_and_part_no_number_from_its_unit(width: int) -> None:
    found = SearchResult(total=36_900, excluded=Counter({"reason " * 9: 1000}), classes=17)
    lines = _shown(found, 72 * 2**30, width)
    assert max(map(len, lines)) <= width and not any(line != line.rstrip() for line in lines)
    assert not any(line[-1:].isdigit() for line in lines)
    assert all(line.startswith("    ") for line in lines if line.lstrip().startswith("reason"))


def test_more_memory_than_the_device_has_is_shown() -> None:
    assert "has 80.0 GiB" in " ".join(_shown(SearchResult(), 500 * 2**40))
    assert "has" not in " ".join(_shown(SearchResult(), 72 * 2**30))


def test_an_interrupted_search_without_a_result_promises_none() -> None:
    assert "best so far" not in " ".join(_shown(SearchResult(complete=False), 2**30))


def test_small_amounts_have_three_digits_that_count() -> None:
    assert [_amount(x) for x in (0.0061912, 0.0, 12.3456, 1234.5)] == ["0.00619", "0.00", "12.35", "1,234.50"]


def test_a_search_that_shows_fewer_to_save_time_says_how_to_get_more() -> None:
    time = StepTime("H100", 1, 1, 1, {"gemm": 1.0}, {}, {}, {}, 1, 0, 0, 1e15, 4096, 4)
    one = TracedWhole(Candidate(dp_shard=4), 2**30, {}, time)
    for cut_short in (True, False):
        lines = " ".join(_shown(SearchResult(results=[one], cut_short=cut_short), 2**31, width=100))
        assert ("`--top 5` makes as many" in lines) is cut_short
