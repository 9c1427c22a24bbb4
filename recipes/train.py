"""Train a model under a plan: `python -m recipes.train parallel=tp8_cp2`.

The configuration is composed once, here in the parent, where everything that can be wrong is looked for. Then
the ranks are started (or joined, under torchrun and Slurm), and each runs `train`.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # `python recipes/train.py`, which is what Hydra's shell completion calls
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from parallelizer import interrupts

if __name__ == "__main__":
    interrupts.end_at_once()  # what follows takes a second or two, and outcome.py is not there yet

import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import parallelizer as pz
from parallelizer import launch
from parallelizer.across_nodes import across_nodes, nodes_of
from parallelizer.compose import running_origins, searched_first
from parallelizer.config import config_folder
from parallelizer.diagnostics import Diagnostic, PlanError, Span, has_errors
from parallelizer.show import diagnostics as show_diagnostics
from parallelizer.show import dry_run
from parallelizer.show import plan as show_plan
from recipes import outcome, run_name, slurm_jobs, slurm_launcher
from recipes.data.tokenizer import save_tokenizer
from recipes.forecast import look_ahead
from recipes.loop import train
from recipes.own_configs import own_folders
from recipes.prepare import Job, prepare
from recipes.result import Result
from recipes.settings import Settings
from recipes.summary import summary

run_name.register()
slurm_launcher.register()


def run(config: DictConfig, folder: Path | None, outside: launch.OutsideRanks | None) -> None:
    """One job: check it, show its plan, train, and say how it went. Raises PlanError and LaunchError."""
    leads = folder is not None
    job = prepare(config, running_origins(), folder)
    mesh, device, settings = job.setup.mesh, job.setup.device, job.settings
    if config.dry_run:
        if folder is not None:
            outcome.discard(folder)
            _dry_run(job)
        return
    _check_world(job.setup, settings, outside)
    if leads:
        forecast, findings = look_ahead(job.setup, job.program, settings)
        job = replace(job, forecast=forecast)
        found = (*job.program.diagnostics, *_crossing(job.setup, outside), *findings)
        if has_errors(found):
            raise PlanError(found)
        show_diagnostics.write(found, sys.stderr)
        show_plan.write(job.program, job.setup.build_model(), sys.stdout)
        sys.stdout.flush()
    if outside is not None:
        result = launch.join(
            _joined,
            (job,),
            device=device,
            collective_timeout=settings.collective_timeout,
            stuck_after=settings.stuck_after,
        )
    else:
        result = launch.start(
            train,
            (job,),
            ranks=mesh.world_size,
            device=device,
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
            save_tokenizer(job.position.options.get("tokenizer"), Path(config.train.save))
            before = "" if settings.save is not None else ", by the run that ended before"
            print(f"model saved in {config.train.save}{before}")
    if result.stopped:
        sys.exit(settings.requeue_code)


def _crossing(setup: pz.Setup, outside: launch.OutsideRanks | None) -> tuple[Diagnostic, ...]:
    """Whether ranks of tp lie on several nodes, as torchrun or Slurm has dealt them out."""
    if outside is None:
        return ()
    nodes = outside.nodes or nodes_of(setup.mesh, setup.hardware)
    return across_nodes(setup.mesh, nodes, setup.hardware)


def _dry_run(job: Job) -> None:
    """What `parallelizer plan` prints. Raises PlanError when the step cannot run."""
    setup, program, model = job.setup, job.program, job.setup.build_model()
    step, found = dry_run.trace_step(setup, program, model)
    if has_errors(found):
        raise PlanError(found)
    dry_run.write(setup, program, model, step, found)


def _joined(job: Job) -> Result:
    """As one of ranks that others started: rank 0 has chosen the output folder, and looked whether the model is saved
    there already; the others learn of it.
    """
    chosen = [str(job.folder), job.settings.save]
    dist.broadcast_object_list(chosen, src=0)
    folder, settings = Path(str(chosen[0])), replace(job.settings, save=chosen[1])
    with outcome.rank_reported(dist.get_rank(), dist.get_world_size(), folder):
        return train(replace(job, folder=folder, settings=settings))


def _check_world(setup: pz.Setup, settings: Settings, outside: launch.OutsideRanks | None) -> None:
    """Whether there are, or can be had, as many ranks as the mesh wants."""
    world = setup.mesh.world_size
    if outside is None:
        command = shlex.join(["-m", "recipes.train", *sys.argv[1:]])
        launch.check_ranks(world, setup.device, max_cpu_ranks=settings.max_cpu_ranks, command=command)
        return
    if outside.world_size != world:
        message = (
            f"the mesh has {world} ranks ({setup.mesh}), {outside.launcher} started {outside.world_size}"
        )
        span = setup.origins.span("parallel.mesh") or Span("<configuration>")
        help = f"start {world} ranks, or choose a mesh of {outside.world_size}"
        raise PlanError([Diagnostic("world-size", message, span, help)])
    if setup.device == "cuda" and not torch.cuda.is_available():
        message = f"rank {outside.rank} was started where there is no GPU"
        raise launch.LaunchError(message, "let CPU processes stand in for GPUs: device=cpu")


@hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="train")
def task(config: DictConfig) -> None:
    """What Hydra calls, once for each job of a sweep."""
    now, outside = HydraConfig.get(), launch.outside_ranks()
    folder = Path(now.runtime.output_dir) if outside is None or outside.rank == 0 else None
    with outcome.job_reported(folder, sweep=now.mode == RunMode.MULTIRUN):
        run(config, folder, outside)


def main() -> None:
    """Hydra's command line, for one process of a job."""
    # Ranks are forked from this process: an OpenMP region here would hang children that use two threads.
    torch.set_num_threads(1)
    with outcome.command_reported(), searched_first(own_folders(sys.argv)):
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
        try:
            task()
        except SystemExit as end:
            if outside is None:
                raise
            launch.leave(outcome.status_of(end))
        if outside is not None:
            launch.leave()


if __name__ == "__main__":
    interrupts.raise_again()
    main()
