"""A preset's `routing`, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_routing import read_routing
from parallelizer.configuration.reading import Reading
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import Mesh
from parallelizer.language.routing import BALANCED, Routing


def read(value: str, ep: int = 2) -> tuple[Routing, list[Diagnostic]]:
    reading = Reading(*compose_config([f"++parallel.routing={value}"]))
    return read_routing(reading, Mesh({"dp_shard": 4}, ep=ep)), list(reading.findings.items)


@pytest.mark.parametrize(
    ("value", "routing"),
    [
        ("balanced", BALANCED),
        ("worst", Routing(worst=True)),
        ("{skew: 1.3}", Routing(skew=1.3)),
        ("{skew: 2}", Routing(skew=2.0)),
    ],
)
def test_words_and_a_skew(value: str, routing: Routing) -> None:
    assert read(value) == (routing, [])


def test_a_skew_matters_to_ranks_that_share_experts_out() -> None:
    assert read("{skew: 9}", ep=1)[1] == []


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ("{skew: 0.5}", "wrong-type", "skew is '0.5'"),
        (
            "{skew: 99}",
            "unknown-value",
            "skew is 99, and the busiest of ep=2 ranks gets at most 2 times the mean",
        ),
        ("{skow: 1}", "unknown-value", "there is no routing"),
        ("evenly", "unknown-value", "no file of that name"),
        ("4", "unknown-value", "there is no routing '4'"),
    ],
)
def test_other_values_are_refused_at_their_place(value: str, code: str, said: str) -> None:
    routing, [found] = read(value)
    assert not routing.counted and found.code == code and said in found.message
    assert found.span is not None and "routing" in found.span.file


def test_a_file_of_a_run(tmp_path: Path) -> None:
    counts = {"moe": [[[3, 5], [6, 2]]]}
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    routing, found = read(str(tmp_path / "counts.json"))
    assert found == [] and routing.counted == counts and str(routing) == "as counted by a run"
    assert routing.file.endswith("counts.json") and routing.span is not None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"moe": [[[1, -2]]]}', '{"moe": [[[1, 2], [3]]]}', '{"moe": 3}']
)
def test_a_file_of_another_form(tmp_path: Path, text: str) -> None:
    (tmp_path / "counts.json").write_text(text)
    routing, [found] = read(str(tmp_path / "counts.json"))
    assert routing == BALANCED and "counts.json has no counts of experts" in found.message
