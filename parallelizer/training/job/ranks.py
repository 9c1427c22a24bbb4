"""The ranks of a job: as many as the mesh has, started here, or started by torchrun or Slurm and joined."""

from __future__ import annotations

import torch

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.settings import Settings


def check_ranks(setup: Setup, settings: Settings, outside: launch.OutsideRanks | None, command: str) -> None:
    """Whether there are as many ranks as the mesh has, or this machine can start them.

    `command` is what torchrun would have to start. Raises PlanError and LaunchError.
    """
    world = setup.mesh.world_size
    if outside is None:
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
