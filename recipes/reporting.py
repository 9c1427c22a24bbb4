"""All that is told of a run while it goes: `metrics.jsonl`, trackers, a panel or lines, profiles, and the first step beside
the dry run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.step import Step
from recipes.checkpoint import Keeper, is_restart
from recipes.first_step import FirstStep
from recipes.live import View
from recipes.memory import memory
from recipes.metrics import MetricsWriter
from recipes.prepare import Job
from recipes.profiling import Profiling
from recipes.progress import Progress
from recipes.result import Result
from recipes.trackers import Trackers


class Reporting:
    """What a rank tells of its steps, as a context around them; only rank 0 tells anything but profiles.

    `first` steps were done before; with `cut_back` what stands of later ones in the folder's files goes.
    """

    def __init__(
        self, job: Job, mesh: DeviceMesh, device: torch.device, *, first: int, cut_back: bool
    ) -> None:
        self.job, self.device, self.first = job, device, first
        self.leads = dist.get_rank() == 0
        self.units = job.setup.workload.batch_size * job.data.units(job.setup.workload.seq_len)
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.skipped = 0
        self.view = _view(job, first)
        self.compared = _first_step(job, mesh, device, leads=self.leads)
        self.profiling = Profiling(job.settings.profile, job.folder, dist.get_rank(), device)
        self.progress = Progress(job.settings, self.view, quiet=not self.leads)
        self.trackers: Trackers | None = None
        self.metrics: MetricsWriter | None = None
        self._done_before = first if cut_back else None
        self._inside = ExitStack()

    def __enter__(self) -> Reporting:
        with ExitStack() as stack:  # what has been opened is closed if the next cannot be
            stack.enter_context(self.profiling)
            if self.leads:
                self.trackers = stack.enter_context(_trackers(self.job, self.first))
            stack.enter_context(self.progress)
            if self.leads and self.job.folder is not None:
                writer = MetricsWriter(self.job.folder / "metrics.jsonl", done=self._done_before)
                self.metrics = stack.enter_context(writer)
            self._inside = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.__exit__(kind, error, trace)

    def begin(self) -> None:
        """A step begins; its batch is yet to be made."""
        self._begun = time.monotonic()

    @contextmanager
    def step(
        self,
        number: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Mapping[str, torch.Tensor]],
    ) -> Iterator[None]:
        """Around a step: it is profiled, or compared with the dry run, where that is due."""
        with ExitStack() as stack:
            stack.enter_context(self.profiling.step(number))
            if self.compared is not None and number == self.first + 1:
                memory_too = not self.profiling.covers(number)
                stack.enter_context(self.compared.watched(model, optimizer, parts, memory=memory_too))
            yield

    def measured(self, number: int, done: Step, rate: float) -> dict[str, float]:
        """What a step came to. Reads its loss, which waits for the device."""
        values = {
            "step": number,
            "loss": done.loss.item(),
            "grad_norm": done.grad_norm.item(),
            "lr": rate,
            "tokens_per_second": self.units / (time.monotonic() - self._begun),
        }
        self.profiling.after(number)
        if (mfu := self.job.forecast.mfu(self.units / values["tokens_per_second"])) is not None:
            values["mfu"] = mfu
        self.losses.append(values["loss"])
        self.rates.append(values["tokens_per_second"])
        self.skipped += done.skipped is not None
        return values

    def tell(self, measured: Mapping[str, float]) -> None:
        """Tell a step's measures to all who want them."""
        number = int(measured["step"])
        if self.metrics:
            self.metrics.write(**measured)  # type: ignore[arg-type]
        if self.trackers:
            self.trackers.write(number, {k: v for k, v in measured.items() if k != "step"})
        self.view.skipped = self.skipped
        self.progress.step(dict(measured), memory(self.device) if self.leads else None)
        if self.compared is not None and number == self.first + 1:
            self.compared.tell(number)
            self.view.compared = self.compared.peaks

    def saved(self, keeper: Keeper) -> None:
        """What has become of checkpoints is told too."""
        keeper.report()
        self.view.saved = keeper.written_step

    def ended(self, stopped: int) -> None:
        """The last step is done; `stopped` is the signal that asked for it, or 0."""
        if self.trackers and stopped:
            self.trackers.status = "stopped"

    def result(self, keeper: Keeper, validation: float | None, stopped: int) -> Result:
        """What the run comes to, but for how long it took."""
        planned = self.job.forecast.planned
        result = Result(
            tuple(self.losses),
            validation,
            self.job.data.baseline,
            0.0,
            first=self.first,
            stopped=stopped,
            checkpoint=keeper.written,
            unwritten=keeper.unwritten,
            rates=tuple(self.rates),
            tokens=self.units,
            unit=self.job.data.unit,
            skipped=self.skipped,
            memory=memory(self.device) if self.leads else None,
            predicted=planned.peak if planned is not None else None,
            profiled=self.profiling.written,
        )
        if result.speed is None:
            return result
        return replace(result, mfu=self.job.forecast.mfu(self.units / result.speed[1]))


def _first_step(job: Job, mesh: DeviceMesh, device: torch.device, *, leads: bool) -> FirstStep | None:
    """Who compares the first step with the dry run; None where nobody does: ranks that were started again have done so."""
    if not job.settings.compare or is_restart():
        return None
    return FirstStep(job.forecast, job.program, mesh, device, leads=leads)


def _view(job: Job, done: int) -> View:
    planned = job.forecast.planned
    return View(
        f"{Path(job.setup.plan.name).stem} on {job.setup.mesh}",
        job.settings.steps,
        job.data.unit,
        done,
        planned.peak if planned is not None else None,
    )


def _trackers(job: Job, done: int) -> Trackers:
    config: Any = OmegaConf.to_container(OmegaConf.create(job.record.get("config", "")), resolve=False)
    return Trackers(job.settings.trackers, config, job.folder or Path(), done)
