"""The time of a step as text, and two of them compared."""

from __future__ import annotations

import dataclasses
import io

import pytest

from parallelizer.report.diff import Side, document
from parallelizer.report.rows.time import compared, costliest_modules, duration
from parallelizer.report.text import time as show_time
from parallelizer.simulate.time.predict import StepTime

ONE = StepTime(
    machine="toy", seconds=2.0, low=1.8, high=2.2, compute={"gemm": 1.2, "attention": 0.2, "memory": 0.2},
    waits={"tp": 0.3, "dp_shard": 0.1}, modules={"layers.0.w2": 0.5, "layers.1.w2": 0.5, "norm": 0.1},
    links={"tp": 0.3, "dp_shard": 0.9, "cp": 0.2}, flops=10**12, again=0, whole_attention=10**11, peak=10**12,
    tokens=4000, ranks=4,
)  # fmt: skip


def printed(time: StepTime, device: str = "cuda", width: int = 100) -> str:
    stream = io.StringIO()
    show_time.write(time, stream, device=device, width=width)
    return stream.getvalue()


def test_the_step_its_range_and_where_it_goes() -> None:
    text = " ".join(printed(ONE).split())
    assert "time 2 s a step (1.8 to 2.2 s) on toy" in text
    assert "55% MFU (50% without the masked half of attention), 500 tokens/s a device" in text
    assert "compute 80%: GEMMs 60, attention 10, elementwise 10 waiting 20%: tp 15, dp_shard 5" in text
    assert "the costliest: layers.*.w2 50%, norm 5%" in text
    assert "dp_shard 900 ms, waited for 100 ms; tp 300 ms, waited for 300 ms; cp 200 ms, hidden" in text
    assert "device=cuda" not in text and "device=cuda" in printed(ONE, "cpu")


@pytest.mark.parametrize("width", [40, 60, 100])
def test_it_fits(width: int) -> None:
    assert max(map(len, printed(ONE, width=width).splitlines())) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(19.27, "19.3 s"), (1234, "1,234 s"), (0.82, "820 ms"), (6.1e-5, "61 µs"), (0, "0 µs")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_equal_layers_count_together() -> None:
    assert [(s.name, s.seconds) for s in costliest_modules(ONE)] == [("layers.*.w2", 1.0), ("norm", 0.1)]


def test_the_faster_of_two_and_why() -> None:
    faster = dataclasses.replace(ONE, seconds=1.75, waits={"tp": 0.05, "dp_shard": 0.1})
    *_, line = compared(ONE, faster, ("a", "b"))
    assert line == "b is 14% faster: waiting for tp less by 100% of the difference"
    assert compared(ONE, ONE, ("a", "b"))[-1] == "neither is faster"


def test_steps_of_different_sizes_are_compared_by_tokens() -> None:
    doubled = dataclasses.replace(ONE, seconds=4.0, tokens=8000)
    assert compared(ONE, doubled, ("a", "b"))[-1] == "neither is faster"


def test_json_names_the_faster_side_and_the_causes() -> None:
    faster = dataclasses.replace(ONE, seconds=1.75, waits={"tp": 0.05, "dp_shard": 0.1})
    found = document(Side({}, ONE), Side({}, faster), ("a", "b"))
    assert found["seconds"] == [2.0, 1.75] and found["faster"] == "b"
    assert found["causes"] == [{"cause": "waiting for tp", "share": pytest.approx(1.0)}]
    assert document(Side({}, None), Side({}, ONE), ("a", "b"))["causes"] == []
