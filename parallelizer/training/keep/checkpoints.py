"""The checkpoints of a run: when it saves, where it starts, and its messages about both."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.yaml_nodes import shown_path
from parallelizer.runtime.checkpoint import folder as names
from parallelizer.runtime.checkpoint.choose import CheckpointPlace
from parallelizer.runtime.checkpoint.loading import (
    Opened,
    load_checkpoint,
    newest_checkpoint,
    open_checkpoint,
    same_mesh,
)
from parallelizer.runtime.checkpoint.lock import hold
from parallelizer.runtime.checkpoint.saving import Checkpoints
from parallelizer.runtime.fail_together import together
from parallelizer.styles.random_numbers import derived_seed, seed_ranks
from parallelizer.training.data.files import FileRecord, check_unchanged
from parallelizer.training.data.position import DataPosition
from parallelizer.training.keep import changes
from parallelizer.training.settings import Settings

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables that count how often the ranks of a run, or its job, have been started again."""


def place_of(settings: Settings, output: Path) -> CheckpointPlace:
    """From the settings and the output folder."""
    folder = Path(settings.checkpoint_dir) if settings.checkpoint_dir else output / names.SUBFOLDER
    return CheckpointPlace(
        folder, Path(settings.resume) if settings.resume not in ("auto", "never") else None
    )


class RunCheckpoints:
    """The checkpoints of one run: the one that it resumes from, and those that it saves. All ranks create
    it together, with `Job.checkpoints`.
    """

    def __init__(
        self,
        place: CheckpointPlace,
        settings: Settings,
        record: Mapping[str, Any],
        position: DataPosition,
        mesh: DeviceMesh,
        *,
        leads: bool,
    ) -> None:
        self.place, self.settings, self.record, self.mesh = place, settings, dict(record), mesh
        self.position, self.leads = position, leads
        self.saved: int | None = None
        self.written: Path | None = None
        self.unwritten = 0
        self.saves = settings.checkpoint_every > 0
        holds = self.saves or place.folder.is_dir()
        self.held = together(lambda: hold(place.folder) if leads and holds else None)
        self.checkpoints = Checkpoints(
            place.folder, keep_last=settings.keep_last, keep_every=settings.keep_every
        )
        self.goes_on = is_restart()

    def find(self) -> Opened | None:
        """The checkpoint to start from: the newest complete one of this run, else the one that was given.
        Collective. Raises PlanError on all ranks.
        """
        if begins_anew(self.settings):
            return None
        found, passed = newest_checkpoint(self.place.folder)
        if found is None and passed:
            help_text = (
                "no checkpoint here is complete: start from another folder (train.resume), or start a new run in another "
                "hydra.run.dir"
            )
            raise PlanError(replace(d, help=help_text, severity="error") for d in passed)
        if self.leads and passed:
            show_diagnostics.write(passed, sys.stderr)
        if found is None and self.place.given is not None:
            return open_checkpoint(names.resolved(self.place.given))
        if found is not None and self.place.given is not None and self.leads:
            print(f"train.resume={self.place.given} is not used: this run has checkpoints of its own")
        return found

    def load(self, opened: Opened, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Resume from a checkpoint. Returns the number of steps that are done, and of samples in them.
        Collective. Raises PlanError on all ranks.
        """
        there = DataPosition.from_json(opened.state["position"])
        ours = opened.path.parent == self.place.folder
        load_checkpoint(opened if ours else opened.path, model, optimizer)  # `find` has hashed our own
        self.saved = opened.step if ours else None
        self.written = opened.path
        self.goes_on = True
        if not same_mesh(opened, model):
            seed_ranks(self.mesh, derived_seed(self.settings.seed, f"step {opened.step}"))
        if self.leads:
            mesh = " x ".join(f"{axis}={size}" for axis, size in opened.mesh.items()) or "1 rank"
            print(f"resuming after step {opened.step} from {shown_path(opened.path)}, saved on {mesh}")
            if (differences := changes.told(opened.state, self.record)) is not None:
                print(differences)
            sys.stdout.flush()
        return opened.step, there.samples

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after this number of steps."""
        every = self.settings.checkpoint_every
        return bool(every) and (step % every == 0 or step == self.settings.steps)

    def save(
        self,
        step: int,
        samples: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        wait: bool = False,
    ) -> None:
        """Start to save; with `wait`, wait until it is written. Collective. Raises PlanError on all ranks
        if the data's files have changed.
        """
        if self.saved != step:
            files = together(self._files)
            self.position = replace(self.position, samples=samples, files=files)
            state = {**self.record, "position": self.position.to_json()}
            self.checkpoints.save(step, model, optimizer, state)
            self.saved = step
        if wait:
            self.checkpoints.wait()
        self.report()

    @property
    def written_step(self) -> int | None:
        """The step of the last checkpoint that was written."""
        return None if self.written is None else names.step_of(self.written)

    def _files(self) -> tuple[FileRecord, ...]:
        return check_unchanged(self.position.files) if self.leads else self.position.files

    def report(self) -> None:
        """Note what was written, and say what could not be."""
        for ended in self.checkpoints.ended():
            if ended.failure is None:
                self.written = ended.path
                continue
            self.unwritten += 1
            if self.leads:
                show_diagnostics.write([ended.failure], sys.stderr)

    def wait(self) -> None:
        """Wait for what is being written."""
        self.checkpoints.wait()
        self.report()


def record_of(config: DictConfig, setup: Setup) -> dict[str, Any]:
    """What a checkpoint tells of the run that it is of: its configuration, and the text of its plan."""
    files = {setup.plan.file, *(rule.span.file for rule in setup.plan.rules if rule.span is not None)}
    texts = {file: Path(file).read_text() for file in sorted(files) if Path(file).is_file()}
    return {
        "config": OmegaConf.to_yaml(config),
        "plan": {"name": setup.plan.name, "files": texts},
        "seed": OmegaConf.select(config, "train.seed"),
    }


def begins_anew(settings: Settings) -> bool:
    """Whether the run must not go on from any checkpoint. What has been started again goes on all the same."""
    return settings.resume == "never" and not is_restart()


def is_restart() -> bool:
    """Whether these ranks have been started again behind others that died, or in a job that was queued again."""
    return any(int(os.environ.get(name) or 0) > 0 for name in RESTARTS)
