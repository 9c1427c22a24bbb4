"""The time line on a page."""

from __future__ import annotations

import re

from parallelizer.report.html.time import section
from parallelizer.simulate.time.constants import Constants
from parallelizer.simulate.time.predict import StepTime, predict_on
from tests.simulate.time.lines import MESH, gathered, machine, memory

PLAIN = Constants(memory=1.0, contention=0.0)


def step(layers: int = 4) -> StepTime:
    line = [
        *gathered(layers, 1 << 30, 1 << 40),
        *(memory(1 << 40, "backward", f"layers.{i}") for i in reversed(range(layers))),
    ]
    return predict_on(machine(), line, MESH, 1, constants=PLAIN)


def test_there_is_a_line_for_the_step_and_one_for_a_layer_in_each_direction() -> None:
    text = section(step())
    assert re.findall(r"<b>([^<]*)</b>", text)[:3] == [
        "The step",
        "layers.2 in forward",
        "layers.2 in backward",
    ]
    assert text.count("<svg") == 3
    assert "dp_shard" in text and "x-dp_shard" in text


def test_boxes_lie_inside_the_plot() -> None:
    for numbers in re.findall(r'<path d="([^"]*)"', section(step())):
        for left, right in re.findall(r"M(-?\d+) [^H]*H(-?\d+)", numbers):
            assert -1 <= int(left) <= int(right) <= 6001


def test_many_operators_become_columns() -> None:
    assert len(section(step(700))) < 200_000


def test_a_step_of_one_module_has_no_layer() -> None:
    assert section(predict_on(machine(), [memory(1 << 40)], MESH, 1)).count("<svg") == 1
