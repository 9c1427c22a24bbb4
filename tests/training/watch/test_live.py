"""The panel of a run on a terminal: what stands in it, at any width."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from parallelizer.training.watch.expert_load import ModuleLoad
from parallelizer.training.watch.live import BARS, View, duration, sparkline
from parallelizer.training.watch.memory import Memory

GIB = 1 << 30


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def view(**known: Any) -> tuple[View, Clock]:
    clock = Clock()
    return View("llama on tp=2", 100, clock=clock, **known), clock


def measured(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 5.0, "grad_norm": 1.5, "lr": 1e-3, "tokens_per_second": 1234.5, **more}


def drawn(shown: View, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, color_system=None).print(shown)
    return out.getvalue().splitlines()


def run(shown: View, clock: Clock, steps: int, seconds: float = 2.0, **more: Any) -> None:
    for step in range(shown.done + 1, shown.done + 1 + steps):
        clock.now += seconds
        shown.step(measured(step, **more), Memory(GIB, 2 * GIB))


def test_the_load_of_experts_is_drawn() -> None:
    shown, clock = view()
    run(shown, clock, 2)
    assert "experts" not in "\n".join(drawn(shown, 80))
    shown.load = ModuleLoad((0, 2, 4, 2), (2, 6), 2)
    text = drawn(shown, 80)
    (experts,) = (line for line in text if line.startswith("│ experts"))
    assert "2.00 of mean" in experts and "▁▅█▅" in experts
    (ranks,) = (line for line in text if line.startswith("│ ranks"))
    assert "1.50 of mean" in ranks


@pytest.mark.parametrize("width", [60, 100, 140])
def test_everything_is_there_and_nothing_is_cut(width: int) -> None:
    shown, clock = view(predicted=3 * GIB)
    run(shown, clock, 40, validation_loss=2.5, mfu=0.4123)
    shown.saved, shown.skipped = 20, 3
    shown.memory = Memory(GIB, 2 * GIB, reserved=4 * GIB)
    text = drawn(shown, width)
    assert {len(line) for line in text} == {min(width, 100)}
    assert len(text) <= 10
    whole = "\n".join(text)
    for name, value in {
        "step": "40/100", "loss": "5.0000", "grad norm": "1.500", "lr": "1.00e-03", "validation": "2.5000",
        "tokens/s": "1,23[45]", "s a step": "2", "MFU": "41.2%", "memory": "1.0 GiB", "peak": "2.0 GiB",
        "predicted": "3.0 GiB", "reserved": "4.0 GiB", "saved": "step 20", "left out": "3 not finite",
    }.items():  # fmt: skip
        assert re.search(rf"[│ ]{name} +{value}[ │]", whole), (name, whole)
    assert "40%  1:20  ETA 2:00" in whole


def test_before_the_first_step_nothing_is_made_up() -> None:
    shown, _ = view()
    assert "ETA - " in drawn(shown, 80)[1]
    assert re.search(r"loss +- ", drawn(shown, 80)[2])


def test_the_time_to_go_runs_on_between_steps_and_leaves_out_the_first_step() -> None:
    shown, clock = view()
    run(shown, clock, 1, seconds=1000.0)
    assert shown.to_go() == pytest.approx(99_000)
    run(shown, clock, 9)
    assert shown.to_go() == pytest.approx(180)
    clock.now += 1.5
    assert shown.to_go() == pytest.approx(178.5)
    clock.now += 1e6
    assert shown.to_go() == 0


def test_on_a_cpu_the_first_step_s_peak_is_beside_its_prediction_and_the_process_is_called_that() -> None:
    shown, clock = view(predicted=9 * GIB, compared=(GIB, 2 * GIB))
    run(shown, clock, 1)
    shown.memory = Memory(4 * GIB, 5 * GIB, whole=True)
    whole = "\n".join(drawn(shown, 100))
    assert re.search(r"process +4.0 GiB +first peak +1.0 GiB +predicted +2.0 GiB", whole)
    assert "9.0 GiB" not in whole and "5.0 GiB" not in whole


@given(st.lists(st.floats(), max_size=300), st.integers(1, 80))
def test_a_sparkline_has_a_character_for_each_value_or_group_of_them(values: list[float], width: int) -> None:
    known = [v for v in values if math.isfinite(v) and abs(v) < 1e300]
    line = sparkline(known, width)
    assert len(line) == min(len(known), width) and set(line) <= set(BARS)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_and_leaves_out_what_is_not_finite() -> None:
    assert sparkline([1, 2, math.nan, 3, math.inf], 10) == "▁▅█"
    assert sparkline([7, 7], 10) == "▁▁"
    assert sparkline([], 10) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (math.inf, "-"), (7, "0:07"), (723.4, "12:03"), (3723, "1:02:03"), (273_900, "3 d 04:05")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
