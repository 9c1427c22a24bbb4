"""What is written can be read back, line by line, while the run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.training.watch.metrics import MetricsWriter


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(step=1, loss=2.5, grad_norm=0.1, tokens_per_second=1e4, validation_loss=3.0)
        (line,) = path.read_text().splitlines()
        assert json.loads(line) == {
            "step": 1,
            "loss": 2.5,
            "grad_norm": 0.1,
            "tokens_per_second": 1e4,
            "validation_loss": 3.0,
        }
    with pytest.raises(ValueError, match="closed"):
        metrics.write(step=2, loss=0.0, grad_norm=0.0, tokens_per_second=0.0)


def test_a_file_holds_one_run_and_those_before_it_are_kept_beside_it(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
            for step in (1, 2):
                metrics.write(step=step, loss=float(run), grad_norm=0.0, tokens_per_second=0.0)
    held = {
        path.name: [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]
        for path in tmp_path.iterdir()
    }
    assert held == {
        "metrics.1.jsonl": [(1, 1.0), (2, 1.0)],
        "metrics.2.jsonl": [(1, 2.0), (2, 2.0)],
        "metrics.jsonl": [(1, 3.0), (2, 3.0)],
    }


@given(loss=st.floats())
def test_floats_come_back_to_the_bit(loss: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(step=0, loss=loss, grad_norm=0.1 + 0.2, tokens_per_second=1 / 3)
    read = json.loads(path.read_text())
    assert read["loss"] == loss or (math.isnan(loss) and math.isnan(read["loss"]))
    assert (read["grad_norm"], read["tokens_per_second"]) == (0.1 + 0.2, 1 / 3)


def test_a_value_that_is_no_number_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics, pytest.raises(TypeError):
        metrics.write(step=0, loss=object(), grad_norm=0.0, tokens_per_second=0.0)  # type: ignore[arg-type]
    assert path.read_text() == ""


def test_a_run_that_goes_on_writes_the_later_steps_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        for step in (1, 2, 3):
            metrics.write(step=step, loss=1.0, grad_norm=1.0, tokens_per_second=1.0)
    with path.open("a") as cut_off:
        cut_off.write('{"step": 2, "lo')
    with MetricsWriter(path, done=2) as metrics:
        metrics.write(step=3, loss=2.0, grad_norm=1.0, tokens_per_second=1.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert list(tmp_path.iterdir()) == [path]
