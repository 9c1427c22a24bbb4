"""All reports of a run: `metrics.jsonl`, trackers, a panel or lines, profiles, and the comparison of the
first step with the dry run.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.configuration.setup import Setup
from parallelizer.proof.certificate import SHORT
from parallelizer.runtime.arriving import Arriving
from parallelizer.runtime.launch import heartbeat
from parallelizer.runtime.taken_step import Step
from parallelizer.styles.application import Program
from parallelizer.training.data.source import Source
from parallelizer.training.keep.checkpoints import RunCheckpoints, is_restart
from parallelizer.training.settings import Settings
from parallelizer.training.trackers import Trackers
from parallelizer.training.watch.expert_load import ExpertLoad, StepLoad
from parallelizer.training.watch.first_step import FirstStep
from parallelizer.training.watch.forecast import Forecast
from parallelizer.training.watch.live import View
from parallelizer.training.watch.memory import memory
from parallelizer.training.watch.metrics import MetricsWriter
from parallelizer.training.watch.profiling import Profiling
from parallelizer.training.watch.progress import Progress
from parallelizer.training.watch.result import Result
from parallelizer.training.watch.summary import is_cross_entropy

WARM, STEADY = 2, 3
"""Steps that warm up, and those behind them whose time is compared with the predicted one."""


@dataclass(frozen=True)
class _Launched:
    """A step that was not measured yet: its number, when it began and when its call returned, and the load of its experts."""

    step: int
    began: float
    returned: float
    load: Arriving | None


class Reporting:
    """A rank's reports of its steps, as a context around them; ranks other than 0 report only profiles.
    `Job.reporting` makes it.

    In each step call `begin`, `step` around the step itself, `measured`, and `tell`; after the last step
    `ended`. `measured` and `tell` may be called when the next step was launched. `done` steps were taken before. `config` is
    the run's configuration, a YAML text. `certificate` is the fingerprint of the run's proof, which the panel shows.
    """

    def __init__(
        self,
        setup: Setup,
        program: Program,
        settings: Settings,
        data: Source,
        forecast: Forecast,
        folder: Path | None,
        config: str,
        mesh: DeviceMesh,
        device: torch.device,
        checkpoints: RunCheckpoints,
        *,
        done: int,
        certificate: str | None = None,
    ) -> None:
        self.data, self.folder, self.device, self.certificate = data, folder, device, certificate
        self.forecast = forecast = forecast.of_devices(device, setup.mesh.world_size)
        self.checkpoints, self.first, self.number = checkpoints, done, done
        self.leads = dist.get_rank() == 0
        self.units = setup.workload.batch_size * data.units(setup.workload.seq_len)
        self.nats = is_cross_entropy(setup.loss())
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.skipped = 0
        self.validation_loss: float | None = None
        self.stopped = 0
        planned = forecast.planned
        self.view = View(
            f"{Path(setup.plan.name).stem} on {setup.mesh}{f', proven ({certificate[:SHORT]})' if certificate else ''}",
            settings.steps,
            data.unit,
            done,
            planned.peak if planned is not None else None,
        )
        # Ranks that were started again have compared their first step before.
        compares = settings.compare and not is_restart()
        self.compared = FirstStep(forecast, program, mesh, device, leads=self.leads) if compares else None
        self.load, self.loaded = ExpertLoad(program, device), StepLoad()
        self.routing = Path(settings.write_routing) if settings.write_routing else None
        self.profiling = Profiling(settings.profile, folder, dist.get_rank(), device)
        self.progress = Progress(settings, self.view, quiet=not self.leads)
        known: Any = OmegaConf.to_container(OmegaConf.create(config), resolve=False)
        self.trackers = Trackers(settings.trackers if self.leads else (), known, folder or Path(), done)
        self.metrics: MetricsWriter | None = None
        # What another run has left in this folder stays, where this one neither goes on from it nor saves.
        self._done_before = done if checkpoints.goes_on or checkpoints.saves else None
        self._inside = ExitStack()
        self.profiled = settings.profile
        self._launched: deque[_Launched] = deque()
        self._began = self._begun = self._ready = time.monotonic()

    def __enter__(self) -> Reporting:
        with ExitStack() as stack:  # what has been opened is closed if the next cannot be
            stack.enter_context(self.profiling)
            stack.enter_context(self.trackers)
            stack.enter_context(self.progress)
            if self.leads and self.folder is not None:
                writer = MetricsWriter(self.folder / "metrics.jsonl", done=self._done_before)
                self.metrics = stack.enter_context(writer)
            self._inside = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.__exit__(kind, error, trace)

    def begin(self, step: int) -> None:
        """The step of this number, from 1, begins. Call it before its batch is made."""
        self.number = step
        self.saved()
        heartbeat.beat(step)
        self._begun = time.monotonic()

    @contextmanager
    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Mapping[str, torch.Tensor]],
    ) -> Iterator[None]:
        """A context around a step, which is profiled or compared with the dry run if that is due."""
        began = self._begun
        with ExitStack() as stack:
            first = self.number == self.first + 1
            stack.enter_context(self.load.step(model, self.routing if first else None))
            stack.enter_context(self.profiling.step(self.number))
            if self.compared is not None and first:
                memory_too = not self.profiling.covers(self.number)
                stack.enter_context(self.compared.watched(model, optimizer, parts, memory=memory_too))
            yield
        self._launched.append(_Launched(self.number, began, time.monotonic(), self.load.summed))

    def at_once(self, step: int) -> bool:
        """Whether the step of this number is to be measured before the next one begins, the same on every rank: the first
        one, and where a profile begins or ends behind it.
        """
        first, last = self.profiled or (0, 0)
        return step in (self.first + 1, first - 1, last)

    def measured(self, taken: Step, learning_rate: float) -> dict[str, float]:
        """The measurements of the earliest step that was not measured: a line of `metrics.jsonl`. Reads its loss, which
        waits for the device.
        """
        launched = self._launched.popleft()
        loss = taken.loss.item()
        # A CPU has computed a step when its call returns. A GPU computes a step while the next one is launched.
        ready = launched.returned if self.device.type == "cpu" else time.monotonic()
        # A GPU that waits for the host has computed two steps when both are read together: no step is faster than its launch.
        seconds = max(ready - max(launched.began, self._ready), launched.returned - launched.began)
        self._ready = ready
        values = {
            "step": launched.step,
            "loss": loss,
            "grad_norm": taken.grad_norm.item(),
            "lr": learning_rate,
            "tokens_per_second": self.units / seconds,
        }
        self.loaded = self.load.read(launched.load)  # the loss has waited for the step
        values |= self.loaded.scalars()
        self.profiling.after(launched.step)
        if (mfu := self.forecast.mfu(self.units / values["tokens_per_second"])) is not None:
            values["mfu"] = mfu
        self.losses.append(values["loss"])
        self.rates.append(values["tokens_per_second"])
        self.skipped += taken.skipped is not None
        return values

    def doing(self, what: str) -> None:
        """Another part of the step that began last begins that may take long, such as `evaluation`. If a rank hangs in it,
        the report names it.
        """
        heartbeat.beat(self.number, what)

    def tell(self, measured: Mapping[str, float]) -> None:
        """Report the measurements of the step. The mapping may have more keys than `measured` returned."""
        if self.metrics:
            by_module = {"experts": table} if (table := self.loaded.table()) else {}
            self.metrics.write(**measured, **by_module)  # type: ignore[arg-type]
        step = int(measured["step"])
        drawn = {k: v for k, v in measured.items() if k != "step"}
        self.trackers.write(step, drawn | self.loaded.tracked())
        self.validation_loss = measured.get("validation_loss", self.validation_loss)
        self.view.skipped, self.view.load = self.skipped, self.loaded.most()
        self.progress.step(dict(measured), memory(self.device) if self.leads else None)
        if self.compared is not None and step == self.first + 1:
            self.compared.tell(step)
            self.view.compared = self.compared.peaks
        if self.compared is not None and step == self.first + WARM + STEADY:
            seconds = [self.units / rate for rate in self.rates[WARM:]]
            self.compared.tell_pace(step, statistics.median(seconds))

    def saved(self) -> None:
        """What has become of checkpoints is told too."""
        self.checkpoints.report()
        self.view.saved = self.checkpoints.written_step

    def ended(self, stopped: int) -> None:
        """The last step was taken; `stopped` is the signal that asked for it, or 0. Waits for the last
        checkpoint.
        """
        self.stopped = stopped
        self.checkpoints.wait()
        self.saved()
        if stopped:
            self.trackers.status = "stopped"

    def result(self) -> Result:
        """The result of the run."""
        planned = self.forecast.planned
        result = Result(
            tuple(self.losses),
            self.validation_loss,
            self.data.baseline,
            time.monotonic() - self._began,
            first=self.first,
            stopped=self.stopped,
            checkpoint=self.checkpoints.written,
            nats=self.nats,
            unwritten=self.checkpoints.unwritten,
            rates=tuple(self.rates),
            tokens=self.units,
            unit=self.data.unit,
            skipped=self.skipped,
            memory=memory(self.device) if self.leads else None,
            predicted=planned.peak if planned is not None else None,
            profiled=self.profiling.written,
        )
        if result.speed is None:
            return result
        seconds = self.units / result.speed[1]
        return replace(
            result, mfu=self.forecast.mfu(seconds), causal_mfu=self.forecast.mfu(seconds, causal=True)
        )
