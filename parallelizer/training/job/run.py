"""`training.run`: all parts of a run except the training itself.

The parent composes the configuration once and runs all checks that need no ranks. Then it starts the ranks,
or joins them under torchrun and Slurm, and each rank calls the recipe's function.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from torch import nn

from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.configuration.compose import running_origins, searched_first
from parallelizer.configuration.validate import validated
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.diagnostics.render import write as write_diagnostics
from parallelizer.proof.unsure import doubted
from parallelizer.proof.validate import Looked, look
from parallelizer.report.text import dry_run
from parallelizer.report.text import plan as show_plan
from parallelizer.runtime.launch import launcher as launch
from parallelizer.runtime.launch import records
from parallelizer.runtime.object_group import object_group
from parallelizer.training.job import outcome, run_name, slurm_jobs, slurm_launcher
from parallelizer.training.job.job import Job
from parallelizer.training.job.prepare import prepare
from parallelizer.training.job.proof import prove_first
from parallelizer.training.job.recipe_file import RecipeFile, importable, recipe_of
from parallelizer.training.watch.forecast import forecast_of
from parallelizer.training.watch.result import Result
from parallelizer.training.watch.summary import summary

Train = Callable[[Job], Result]
"""A recipe's function: the training of one rank."""


def main(train: Train, config_name: str) -> None:
    """The command of a recipe, for one process of a job: Hydra's command line."""
    run_name.register()
    slurm_launcher.register()
    # Ranks are forked from this process: an OpenMP region here would hang children that use two threads.
    torch.set_num_threads(1)
    recipe = recipe_of(train, config_name)
    with outcome.command_reported(recipe), searched_first(recipe.folders(sys.argv)):
        outside = launch.outside_ranks()
        sys.argv += slurm_jobs.more_words(sys.argv)
        if outside is not None and slurm_jobs.MANY & set(sys.argv):
            raise launch.LaunchError(
                f"{outside.launcher} has started the ranks of one job, and -m asks for several",
                "start each job by itself",
            )
        if outside is not None and outside.rank > 0:
            # Only rank 0 makes an output folder: to Hydra we name one that is there, where it leaves nothing.
            sys.argv += [f"hydra.run.dir={tempfile.gettempdir()}", "hydra.output_subdir=null"]
            sys.argv += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        command = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=config_name)
        try:
            command(HydraTask(train, recipe))()
        except SystemExit as end:
            if outside is None:
                raise
            launch.leave(outcome.status_of(end))
        if outside is not None:
            launch.leave()


@dataclass(frozen=True)
class HydraTask:
    """What Hydra calls with a composed configuration, once for each job of a sweep. It is pickled for Slurm."""

    train: Train
    recipe: RecipeFile

    @property
    def __wrapped__(self) -> Train:
        """By its file Hydra names the job."""
        return self.train

    def __call__(self, config: DictConfig) -> None:
        now, outside = HydraConfig.get(), launch.outside_ranks()
        folder = Path(now.runtime.output_dir) if outside is None or outside.rank == 0 else None
        kept = OmegaConf.select(config, "train.checkpoint_dir")
        with outcome.job_reported(
            folder,
            now.mode == RunMode.MULTIRUN,
            Path(str(kept)) if kept else None,
            self.recipe.typed(sys.argv[1:]),
        ):
            run(self.train, self.recipe, config, folder, outside)

    def __reduce__(self) -> tuple[Any, ...]:
        return HydraTask, (importable(self.train), self.recipe)


def run(
    train: Train,
    recipe: RecipeFile,
    config: DictConfig,
    folder: Path | None,
    outside: launch.OutsideRanks | None,
) -> None:
    """One job: check it, show its plan, train, and say how it went. Raises PlanError and LaunchError."""
    job = prepare(config, running_origins(), folder, outside, recipe.typed(sys.argv[1:]))
    setup, settings, dry = job.setup, job.settings, bool(config.dry_run)
    if folder is not None:  # it is rank 0's, or the parent's
        if dry:
            outcome.discard(folder)
        model = setup.build_model()
        # A dry run is of the hardware that is configured, wherever it runs.
        nodes = outside.nodes if outside is not None and not dry else ()
        validation = validated(setup, job.program, model, classes=dry, nodes=nodes or None)
        looked = look(setup, model, validation, Path(settings.proofs))
        if looked.refused:
            raise PlanError(looked.found)
        if not dry:
            job = _announced(job, model, looked, alone=outside is None)
        else:
            dry_run.write(setup, job.program, model, validation.trace, doubted(looked.found))
    if dry:
        return
    if outside is not None:
        result = launch.join(
            joined,
            (train, job),
            device=setup.device,
            collective_timeout=settings.collective_timeout,
            stuck_after=settings.stuck_after,
        )
    else:
        result = launch.start(
            started,
            (train, job),
            ranks=setup.mesh.world_size,
            device=setup.device,
            log_dir=folder,
            start_timeout=settings.start_timeout,
            collective_timeout=settings.collective_timeout,
            # Without checkpoints there is nothing to go on from.
            max_restarts=settings.max_restarts if settings.checkpoint_every else 0,
            stuck_after=settings.stuck_after,
            graceful=settings.stop_grace,
        )[0]
    if folder is not None:
        outcome.tidy(folder)
        summary(result, folder)
        if config.train.save is not None and not result.stopped:
            before = "" if settings.save is not None else ", by an earlier run"
            print(f"model saved in {config.train.save}{before}")
    if result.stopped:
        sys.exit(settings.requeue_code)


def _announced(job: Job, model: nn.Module, looked: Looked, *, alone: bool) -> Job:
    """Show what is known of a run before its ranks start: warnings, the plan and the proof. Returns the job with what is
    expected of its steps, and the fingerprint of its certificate. Raises PlanError when the run must be proven and is not.
    """
    proof, certificate, found = prove_first(job, looked, alone=alone)
    write_diagnostics(found, sys.stderr)
    forecast = forecast_of(job.setup, job.program, model, job.settings, looked.validation)
    shards = parameter_shards(job.program, model)
    show_plan.write(job.program, shards, sys.stdout)
    print(f"proof: {proof}")
    sys.stdout.flush()
    return replace(job, forecast=forecast, record={**job.record, "certificate": certificate})


def started(train: Train, job: Job) -> Result:
    """One of the ranks that this command has started."""
    if job.settings.deterministic:
        use_deterministic_kernels()
    return train(job)


def use_deterministic_kernels() -> None:
    """Let torch raise an error at an operator without a kernel that always gives the same result."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read before the first product of matrices
    torch.use_deterministic_algorithms(True)
    # By default torch then also fills new memory, to find operators that read it: that costs time, and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def joined(train: Train, job: Job) -> Result:
    """One of the ranks that others have started: rank 0 has chosen the output folder, and looked whether the model is
    saved there already; the others learn of it.
    """
    chosen = [str(job.folder), job.settings.save]
    dist.broadcast_object_list(chosen, src=0, group=object_group())
    folder, settings = Path(str(chosen[0])), replace(job.settings, save=chosen[1])
    if job.device.type == "cuda":
        records.write_to(folder)
    with outcome.rank_reported(dist.get_rank(), dist.get_world_size(), folder):
        return started(train, replace(job, folder=folder, settings=settings))
