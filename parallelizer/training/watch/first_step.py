"""Compares the first step of a run with the dry run: its collectives, and its peak memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.diagnostics.units import size
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.peak_of_step import PeakOfStep
from parallelizer.simulate.record.planned import (
    CountMismatch,
    Observed,
    differences,
    observing,
    of_the_step,
    outside_compiled,
)
from parallelizer.styles.application import Program
from parallelizer.training.watch.forecast import Forecast

TOLERATED = (1.1, 128 << 20)
"""How far a peak may lie above the predicted one without a word, as a factor and in bytes: the dry run counts no
kernels' workspaces.
"""

Batch = Mapping[str, torch.Tensor]


class FirstStep:
    """Looks at one step as rank 0 takes it. Nothing of it is left behind in the model, and the next step runs as if it
    had not been there.
    """

    def __init__(
        self, forecast: Forecast, program: Program, mesh: DeviceMesh, device: torch.device, *, leads: bool
    ) -> None:
        self.forecast, self.program, self.mesh, self.device, self.leads = (
            forecast,
            program,
            mesh,
            device,
            leads,
        )
        self.observed: Observed | None = None
        self.peak: int | None = None
        self.seconds: float | None = None
        self.fresh = True

    @contextmanager
    def watched(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Batch],
        *,
        memory: bool = True,
    ) -> Iterator[None]:
        """Around the step. All ranks come here, rank 0 looks. Without `memory` the peak is left alone."""
        states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        self.fresh = not states
        there = [
            *model.parameters(),
            *model.buffers(),
            *states,
            *(t for part in parts for t in part.values()),
        ]
        with observing(self.program, self.mesh, model, active=self.leads) as observed, ExitStack() as stack:
            peak = stack.enter_context(PeakOfStep(self.device, there)) if self.leads and memory else None
            started = self._now()
            yield
            self.seconds = self._now() - started
        self.observed = observed
        self.peak = peak.bytes if peak is not None else None

    def _now(self) -> float:
        """The time when the device has done everything that it was asked for."""
        if self.device.type == "cuda" and self.leads and self.forecast.seconds is not None:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @property
    def times(self) -> tuple[float, float] | None:
        """The seconds that the step took, and those that were predicted."""
        predicted = self.forecast.seconds
        return None if self.seconds is None or predicted is None else (self.seconds, predicted)

    @property
    def predicted(self) -> int | None:
        """The peak that this step should have; later ones have the optimizer's states on top from the beginning."""
        planned = self.forecast.planned
        return None if planned is None else planned.first_peak if self.fresh else planned.peak

    @property
    def peaks(self) -> tuple[int, int] | None:
        """The peak that was measured, and the one that was predicted for it."""
        return None if self.peak is None or self.predicted is None else (self.peak, self.predicted)

    def tell(self, step: int) -> None:
        """Say how the step of this number compares: a line, and a warning for what differs. Only rank 0 does."""
        if not self.leads or self.observed is None:
            return
        planned = self.forecast.planned
        why = self.forecast.reason or self.observed.failure
        if planned is None or why:
            print(f"step {step}: not compared with the dry run: {why}", flush=True)
            return
        counted = of_the_step(self.observed.entries)
        ledger = outside_compiled(planned.ledger, self.observed.compiled)
        compared = StepComparison(step, ledger, counted, self.peaks, self.device.type, self.times)
        print(compared, flush=True)
        show_diagnostics.write(compared.findings(), sys.stderr, summary=False)

    def tell_pace(self, step: int, seconds: float) -> None:
        """Say how long steps take after warm-up, up to the step of this number, beside the predicted time. Only rank 0 does."""
        predicted = self.forecast.seconds
        if self.leads and predicted is not None:
            apart = f"{100 * (seconds / predicted - 1):+.0f} %"
            print(
                f"up to step {step}: {seconds:.3g} s a step after warm-up, {predicted:.3g} s predicted ({apart})",
                flush=True,
            )


@dataclass(frozen=True)
class StepComparison:
    """A step's collectives and those that were planned, its peak with the one predicted, in bytes, and its time with the one
    predicted, in seconds. A first step is slower than later ones: nothing is found in its time.
    """

    step: int
    planned: Sequence[Collective]
    counted: Sequence[Collective]
    peaks: tuple[int, int] | None = None
    device: str = "cpu"
    times: tuple[float, float] | None = None

    def __str__(self) -> str:
        """`step 1: 412 collectives as planned; peak 61.0 GiB, 61.2 predicted`."""
        number = len(self.counted)
        collectives = f"{number:,} collective{'s' if number != 1 else ''}" if number else "no collectives"
        if differences(self.planned, self.counted):
            text = f"step {self.step}: {collectives}, {len(self.planned):,} planned"
        else:
            text = f"step {self.step}: {collectives}{'' if number else ','} as planned"
        text += f"; {_peaks(*self.peaks)}" if self.peaks is not None else ""
        return text + (f"; {_times(*self.times)}" if self.times is not None else "")

    def findings(self) -> list[Diagnostic]:
        """A warning for what differs."""
        found = []
        if apart := differences(self.planned, self.counted):
            found.append(self._not_as_planned(apart))
        if self.peaks is not None and _is_above(*self.peaks):
            found.append(self._above(*self.peaks))
        return found

    def _not_as_planned(self, apart: Sequence[CountMismatch]) -> Diagnostic:
        rule = next((d.rule for d in apart if d.rule is not None), None)
        span = Span(rule[1], rule[2]) if rule is not None else None
        shown = "; ".join(map(str, apart[:4])) + (f"; and {len(apart) - 4} more" if len(apart) > 4 else "")
        help_text = (
            "`python -m parallelizer plan` shows the plan; train.compare=false switches this comparison off"
        )
        if self.device == "cuda":
            help_text = (
                "the dry run follows the operators of the CPU, where DTensor gathers what it exchanges on CUDA: "
                f"all_gather for all_to_all is not an error. {help_text}"
            )
        message = f"step {self.step} did not send what the dry run predicts: {shown}"
        return Diagnostic("not-as-planned", message, span, help_text, severity="warning")

    def _above(self, peak: int, predicted: int) -> Diagnostic:
        message = (
            f"step {self.step} held {size(peak)} at its peak, and the dry run predicts {size(predicted)}"
        )
        help_text = "something holds tensors that the dry run does not know of: a hook, a kernel's workspace, the data"
        return Diagnostic("not-as-planned", message, None, help_text, severity="warning")


def _is_above(peak: int, predicted: int) -> bool:
    factor, more = TOLERATED
    return peak > predicted * factor + more


def _peaks(peak: int, predicted: int) -> str:
    """`peak 61.0 GiB, 61.2 predicted`."""
    (number, unit), (other, its) = size(peak).split(), size(predicted).split()
    return (
        f"peak {number} {unit}, {other} predicted"
        if unit == its
        else f"peak {number} {unit}, {other} {its} predicted"
    )


def _times(seconds: float, predicted: float) -> str:
    """`1.2 s with warm-up, 0.95 s predicted`."""
    return f"{seconds:.3g} s with warm-up, {predicted:.3g} s predicted"
