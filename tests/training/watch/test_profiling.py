"""`train.profile`: the steps that are meant, a trace of each rank, and mistakes at their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.training.settings import read_settings, read_steps
from parallelizer.training.watch.profiling import MOST_RANKS, Profiling
from tests.recipes.runs import run_here

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "steps"),
    [(None, None), (3, (3, 3)), ("3", (3, 3)), ("3:5", (3, 5)), (" 3 : 5 ", (3, 5)), ("10:10", (10, 10))],
)
def test_what_is_meant(value: object, steps: tuple[int, int] | None) -> None:
    assert read_steps(value) == steps


@pytest.mark.parametrize(
    "value", ["", ":", "3:", ":5", "5:3", "0", "0:2", 0, -1, True, 2.5, "a", [3, 5], "3:5:7", "-1:2"]
)
def test_what_is_of_no_use(value: object) -> None:
    with pytest.raises(ValueError, match="step"):
        read_steps(value)


@given(st.text(alphabet="0123456789: -x", max_size=8))
def test_any_text_is_steps_or_refused(text: str) -> None:
    try:
        steps = read_steps(text)
    except ValueError:
        return
    assert steps is not None and 1 <= steps[0] <= steps[1]


def finding(*overrides: str) -> Diagnostic:
    with pytest.raises(PlanError) as error:
        read_settings(*compose_config(overrides))
    [found] = error.value.diagnostics
    return found


@pytest.mark.parametrize("typed", ["train.profile=3:5", "train.profile='3:5'", 'train.profile="3:5"'])
def test_as_people_type_it(typed: str) -> None:
    assert read_settings(*compose_config([typed])).profile == (3, 5)


def test_a_mistake_is_told_where_it_stands() -> None:
    found = finding("train.profile=5:3")
    assert found.code == "wrong-type" and found.span is not None
    assert (found.span.file, found.span.column) == ("<override train.profile=5:3>", 15)


def test_a_file_without_quotes_is_a_number_of_yaml_s_and_told_so(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\ntrain:\n  profile: 3:5\n")
    with pytest.raises(PlanError) as error:
        read_settings(*compose_config([], str(tmp_path), "mine"))
    [found] = error.value.diagnostics
    assert (found.code, found.span.line, found.span.column) == ("yaml-retyped", 3, 12)
    assert found.help == 'write it in quotes: "3:5"'
    (tmp_path / "mine.yaml").write_text('defaults: [train, _self_]\ntrain:\n  profile: "3:5"\n')
    assert read_settings(*compose_config([], str(tmp_path), "mine")).profile == (3, 5)


def traced(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if str(e.get("name")).startswith("step ")})


@pytest.mark.ranks
def test_each_rank_leaves_a_trace_of_these_steps(tmp_path: Path) -> None:
    result = run_here(tmp_path, "parallel=tp2", "train.steps=4", "train.log_every=0", "train.profile=2:3")
    assert result.profiled == tmp_path / "profile"
    files = sorted(p.name for p in (tmp_path / "profile").iterdir())
    assert files == ["rank0.trace.json", "rank1.trace.json"]
    for name in files:
        assert traced(tmp_path / "profile" / name) == ["step 2", "step 3"]


def test_what_there_is_is_written_when_the_run_ends_early(tmp_path: Path) -> None:
    with Profiling((2, 5), tmp_path, 0, CPU) as profiling:
        for step in (1, 2, 3):
            with profiling.step(step):
                torch.ones(3).sum()
            profiling.after(step)
    assert traced(tmp_path / "profile" / "rank0.trace.json") == ["step 2", "step 3"]


@pytest.mark.parametrize(("steps", "rank"), [(None, 0), ((2, 3), MOST_RANKS), ((7, 8), 0)])
def test_nothing_is_written_where_nothing_was_asked_for(
    steps: tuple[int, int] | None, rank: int, tmp_path: Path
) -> None:
    with Profiling(steps, tmp_path, rank, CPU) as profiling:
        for step in (1, 2, 3):
            with profiling.step(step):
                pass
            profiling.after(step)
    assert list(tmp_path.iterdir()) == [] and profiling.written is None
