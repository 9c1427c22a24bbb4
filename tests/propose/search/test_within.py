"""`--within`: which values of a key are tried."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.propose.search.within import read_within


def test_a_range_of_numbers_holds_both_ends() -> None:
    within, _ = read_within(["mesh.tp=2..8"])
    assert [n for n in (1, 2, 4, 8, 16) if within.number("mesh.tp", n)] == [2, 4, 8]


def test_several_numbers_are_those_alone() -> None:
    within, _ = read_within(["mesh.tp=1,8"])
    assert [n for n in (1, 2, 4, 8) if within.number("mesh.tp", n)] == [1, 8]


def test_words_come_in_their_own_order_and_a_star_is_all_of_them() -> None:
    within, _ = read_within(["pipeline.schedule=zbv,gpipe"])
    assert within.words("pipeline.schedule") == ("gpipe", "zbv")
    within, _ = read_within(["pipeline.schedule=*"])
    assert "dualpipev" in within.words("pipeline.schedule")


def test_a_key_without_a_limit_takes_any_number_and_the_usual_words() -> None:
    within, _ = read_within([])
    assert within.number("mesh.tp", 512)
    assert within.words("pipeline.schedule") == ("1f1b", "interleaved-1f1b", "zbv")


def test_a_star_takes_all_numbers_and_is_a_limit() -> None:
    within, _ = read_within(["rows=*"])
    assert within.number("rows", 64) and within.sets("rows")


def test_a_key_of_the_configuration_fixes_a_key_of_the_search_and_is_taken_out() -> None:
    within, rest = read_within([], ["model=llama3_8b", "parallel.mesh.tp=8", "train.accumulate=2"])
    assert rest == ["model=llama3_8b"]
    assert within.number("mesh.tp", 8) and not within.number("mesh.tp", 4)
    assert within.number("accumulate", 2) and not within.number("accumulate", 1)


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ("mesh.pt=1..8", "mesh.pt"),
        ("mesh.tp", "no values"),
        ("mesh.tp=few", "no numbers"),
        ("mesh.tp=8..1", "ends below its start"),
        ("stream=half", "half"),
        ("checkpoint.share=0", "no share"),
        ("checkpoint.share=0.5,2", "no share"),
        ("checkpoint.share=2..3", "no share"),
    ],
)
def test_a_wrong_limit_is_named(limit: str, named: str) -> None:
    with pytest.raises(PlanError) as raised:
        read_within([limit])
    [found] = raised.value.diagnostics
    assert found.code == "search-within" and named in found.message


@pytest.mark.parametrize(
    "limit",
    [
        "mesh.tp=-1",
        "mesh.tp=-1..2",
        "mesh.tp=0",
        "mesh.tp=0.5",
        "rows=0..0",
        "accumulate=1,0",
        "rows=1.2..1.8",
    ],
)
def test_a_limit_without_a_number_that_the_key_can_be_is_refused(limit: str) -> None:
    with pytest.raises(PlanError, match="has no number that"):
        read_within([limit])


def test_a_range_of_shares_ends_at_all_layers() -> None:
    with pytest.raises(PlanError, match="no share"):
        read_within(["checkpoint.share=0..2"])
    assert read_within(["checkpoint.share=0.5.."])[0].shares() == (1.0, 0.75, 0.5)


def test_a_key_that_is_fixed_cannot_have_a_limit_too() -> None:
    with pytest.raises(PlanError, match="which --within limits too"):
        read_within(["mesh.tp=1..4"], ["parallel.mesh.tp=2"])


def test_limits_are_shown_as_they_are_written() -> None:
    limits = ["mesh.tp=1..8", "rows=2..", "checkpoint=none,full", "mesh.cp=1,2"]
    within, _ = read_within(limits, ["parallel.mesh.pp=2"])
    assert within.text() == "mesh.tp=1..8, rows=2.., checkpoint=full,none, mesh.cp=1,2, mesh.pp=2"
