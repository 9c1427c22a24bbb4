"""A run's first step says how it compares with the dry run, in a line; what differs is a warning."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallelizer.simulate.record.ledger import Collective
from parallelizer.training.watch.first_step import FirstStep, StepComparison
from parallelizer.training.watch.forecast import Forecast
from tests.recipes.runs import SMALL, metrics, typed

GIB = 1 << 30
COMPARED = [*SMALL[:-1], "train.compare=true"]


def entries(count: int) -> list[Collective]:
    return [Collective("forward", "all_gather", "tp", 2, 4, 4, "float32", "", None, False)] * count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "step 1: no collectives, as planned"),
        (1, "step 1: 1 collective as planned"),
        (1412, "step 1: 1,412 collectives as planned"),
    ],
)
def test_as_planned(count: int, text: str) -> None:
    compared = StepComparison(1, entries(count), entries(count))
    assert str(compared) == text and compared.findings() == []


def test_peaks_stand_beside_each_other() -> None:
    def line(peak: float, predicted: float) -> str:
        return str(StepComparison(1, (), (), (int(peak), int(predicted)))).partition("; ")[2]

    assert line(61 * GIB, 61.2 * GIB) == "peak 61.0 GiB, 61.2 predicted"
    assert line(0.5 * GIB, 1.5 * GIB) == "peak 512.0 MiB, 1.5 GiB predicted"


def test_what_differs_is_a_warning_and_no_error() -> None:
    compared = StepComparison(3, entries(2), entries(5))
    assert str(compared) == "step 3: 5 collectives, 2 planned"
    [found] = compared.findings()
    assert (found.code, found.severity) == ("not-as-planned", "warning")
    assert "tp all_gather in forward: 2 planned, 5 counted" in found.message
    assert "CUDA" not in (found.help or "")
    [on_cuda] = StepComparison(3, entries(2), entries(5), device="cuda").findings()
    assert "all_gather for all_to_all is not an error" in (on_cuda.help or "")


@pytest.mark.parametrize(("peak", "warned"), [(60, False), (66, False), (80, True)])
def test_a_peak_far_above_the_predicted_one_is_a_warning(peak: int, warned: bool) -> None:
    found = StepComparison(1, (), (), (peak * GIB, 60 * GIB)).findings()
    assert [f.code for f in found] == ["not-as-planned"] * warned


@pytest.mark.ranks
def test_a_run_says_it_once_behind_its_first_step_and_a_resumed_one_too(tmp_path: Path) -> None:
    run = (*COMPARED, "parallel=fsdp2", "train.checkpoint_every=2", "hydra.run.dir=a")
    first = typed(*run, "train.steps=2", cwd=tmp_path)
    assert first.status == 0, first.err
    [line] = [line for line in first.out.splitlines() if "as planned" in line]
    assert re.fullmatch(r"step 1: 15 collectives as planned; peak [\d.]+ MiB, [\d.]+ predicted", line)
    again = typed(*run, "train.steps=3", cwd=tmp_path)
    assert re.search(r"^step 3: 15 collectives as planned; peak", again.out, re.M), again.out + again.err
    assert [m["step"] for m in metrics(tmp_path / "a")] == [1, 2, 3]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_compiled_model_is_compared_without_its_compilation_being_lost(tmp_path: Path) -> None:
    ended = typed(
        *COMPARED, "parallel=tp2", "train.steps=1", 'rules=["layers.*.feed_forward: compile"]', cwd=tmp_path,
        timeout=120,
    )  # fmt: skip
    assert "step 1: 24 collectives as planned" in ended.out, ended.out + ended.err


def test_the_time_of_a_step_stands_beside_the_predicted_one_and_is_never_a_finding() -> None:
    compared = StepComparison(1, (), (), None, "cpu", (12.0, 0.95))
    assert str(compared).endswith("; 12 s with warm-up, 0.95 s predicted")
    assert compared.findings() == []


@pytest.mark.parametrize("leads", [True, False])
def test_the_pace_behind_warm_up_stands_beside_the_predicted_time(
    leads: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    one: Any = SimpleNamespace(leads=leads, forecast=Forecast(seconds=2.0))
    FirstStep.tell_pace(one, 5, 2.2)
    told = "up to step 5: 2.2 s a step after warm-up, 2 s predicted (+10 %)\n"
    assert capsys.readouterr().out == (told if leads else "")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_with_a_predicted_time_says_its_pace_once(tmp_path: Path) -> None:
    ended = typed(*COMPARED, "hardware=h100", "device=cpu", "train.steps=7", "hydra.run.dir=a", cwd=tmp_path)
    assert ended.status == 0, ended.err
    told = [line for line in ended.out.splitlines() if "after warm-up" in line]
    assert len(told) == 1 and told[0].startswith("up to step 5: "), ended.out
