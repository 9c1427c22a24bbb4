"""The measurements of steps that are read while the device computes the next one."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallelizer.runtime.taken_step import Step
from parallelizer.training.watch import reporting
from parallelizer.training.watch.expert_load import StepLoad
from parallelizer.training.watch.reporting import Reporting


def test_the_last_step_before_an_evaluation_is_not_faster_than_its_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that has long computed both steps when they are read, one right after the other."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(reporting.time, "monotonic", lambda: clock.now)
    report: Any = Reporting.__new__(Reporting)
    report.device, report.units, report._ready = torch.device("cuda"), 100, 0.0
    report.load = SimpleNamespace(read=lambda summed: StepLoad())
    report.profiling = SimpleNamespace(after=lambda step: None)
    report.forecast = SimpleNamespace(mfu=lambda seconds: None)
    report.losses, report.rates, report.skipped = [], [], 0
    report._launched = deque(
        reporting._Launched(step, began, began + 0.5, None) for step, began in enumerate([0.0, 0.5], start=1)
    )
    taken = Step(torch.tensor(1.0), torch.tensor(1.0))
    clock.now = 1.0
    first = report.measured(taken, 0.1)
    clock.now = 1.001
    second = report.measured(taken, 0.1)
    assert (first["step"], second["step"]) == (1, 2)
    assert first["tokens_per_second"] == 100.0
    assert second["tokens_per_second"] == pytest.approx(200.0)  # half a second was its launch
