"""The ranks of a job: as many as the mesh has, started here, or started by torchrun or Slurm and joined."""

from __future__ import annotations

import os

import torch

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.yaml_nodes import shown_path
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.settings import Settings


def check_ranks(setup: Setup, settings: Settings, outside: launch.OutsideRanks | None, command: str) -> None:
    """Whether there are as many ranks as the mesh has, or this machine can start them.

    `command` is what torchrun would have to start. Raises PlanError and LaunchError.
    """
    world = setup.mesh.world_size
    if outside is None:
        if setup.device == "cpu" and not _chosen(setup):
            _check_cores(world)
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


PER_CORE = 8
ANYWHERE = 16
"""So many processes are started on any machine, and so many for each of its cores, without being asked for."""


def _chosen(setup: Setup) -> bool:
    """Whether somebody has set how many processes this machine may start: the shipped value is not meant for it."""
    span = setup.origins.span("launch.max_cpu_ranks")
    return span is not None and span.file != shown_path(config_folder() / "train.yaml")


def _check_cores(world: int) -> None:
    """Raise LaunchError for many more processes than this machine has cores: it would hardly answer any more."""
    cores = len(os.sched_getaffinity(0))
    if world > max(ANYWHERE, PER_CORE * cores):
        raise launch.LaunchError(
            f"{world} processes on {cores} core{'s' * (cores > 1)} would take the whole machine for long",
            f"to start them all the same, set launch.max_cpu_ranks={world}\n"
            "a dry run needs one process for any number of ranks: python -m parallelizer plan ...",
        )
