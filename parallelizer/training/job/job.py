"""The argument of a recipe's function on a rank: a checked configuration, and the parts of a run that it
builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.configuration.setup import Setup
from parallelizer.optim import learning_rate
from parallelizer.runtime.step import Loss
from parallelizer.styles.application import Program
from parallelizer.training.batches import Batches, local_device
from parallelizer.training.data.choose_tokenizer import save_tokenizer
from parallelizer.training.data.position import DataPosition
from parallelizer.training.data.source import Source
from parallelizer.training.guards import Guards
from parallelizer.training.keep.checkpoints import RunCheckpoints, place_of
from parallelizer.training.keep.saved import note_saved, saved_steps
from parallelizer.training.settings import Settings
from parallelizer.training.watch.forecast import Forecast
from parallelizer.training.watch.reporting import Reporting


@dataclass(frozen=True)
class Job:
    """One run, composed and checked before its ranks started.

    `setup` builds the model, the loss and the optimizer; `program` is the compiled plan; `settings` are the
    keys of `train`, `launch` and `optim`; `data` gives the batches. `folder` is the output folder, the same
    on every rank. `weights` is the folder of pretrained weights, or None. `record` is the description of
    the run in its checkpoints, `position` its first position in the data, `forecast` the dry run's
    prediction for a step, which only rank 0 has.
    """

    setup: Setup
    program: Program
    settings: Settings
    data: Source
    folder: Path | None
    weights: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    position: DataPosition = field(default_factory=lambda: DataPosition(0, 0, 0, ""))
    forecast: Forecast = field(default_factory=Forecast)

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return local_device(self.setup.device)

    def checkpoints(self, mesh: DeviceMesh) -> RunCheckpoints:
        """The checkpoints of this run: finds the one to resume from, and saves new ones. Collective."""
        place = place_of(self.settings, self.folder or Path())
        return RunCheckpoints(place, self.settings, self.record, self.position, mesh, leads=_leads())

    def batches(self, mesh: DeviceMesh) -> Batches:
        """This rank's part of each global batch."""
        setup = self.setup
        return Batches(self.data, self.program.plan, setup.workload, self.settings, mesh, self.device)

    def learning_rate(self, step: int) -> float:
        """The learning rate of `step` (from 1) by the schedule in `optim`."""
        settings = self.settings
        return learning_rate(
            step - 1,
            peak=settings.lr,
            warmup=settings.warmup,
            total=settings.steps,
            final_ratio=settings.final_ratio,
            schedule=settings.schedule,
            decay=settings.decay,
        )

    def guards(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Guards:
        """The guards that check each step for values that are not finite and for ranks that hold different
        values. Collective.
        """
        return Guards(self.settings, model, optimizer, loss, leads=_leads())

    def reporting(self, mesh: DeviceMesh, checkpoints: RunCheckpoints, done: int) -> Reporting:
        """The reports of the run, as a context around its steps. `done` steps were taken before."""
        return Reporting(
            self.setup,
            self.program,
            self.settings,
            self.data,
            self.forecast,
            self.folder,
            str(self.record.get("config", "")),
            mesh,
            self.device,
            checkpoints,
            done=done,
            certificate=self.record.get("certificate"),
        )

    @property
    def saved_before(self) -> bool:
        """Whether this run saved its model in `train.save` before it was resumed; that model is then
        replaced.
        """
        if self.folder is None or self.settings.save is None:
            return False
        return saved_steps(self.folder, Path(self.settings.save)) is not None

    def note_saved(self) -> None:
        """Save the tokenizer of the text beside the trained model in the folder `train.save`, and note in the output folder
        that the model is there: the same command, started again, then finds its own model and does not refuse the folder;
        with more steps, it replaces the model.
        """
        if _leads() and self.folder is not None and self.settings.save is not None:
            saved = Path(self.settings.save)
            save_tokenizer(self.position.options.get("tokenizer"), saved)
            note_saved(self.folder, saved, self.settings.steps)


def _leads() -> bool:
    """Whether this is rank 0, which writes and speaks for all."""
    return dist.get_rank() == 0
