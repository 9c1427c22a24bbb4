"""The ranks of a job: as many as the mesh has, started here, or started by torchrun or Slurm and joined."""

from __future__ import annotations

import math
import os

import torch

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.outside import OutsideRanks
from parallelizer.training.settings import Settings

MOST = 64
"""So many processes one machine starts without being asked for more."""

PER_CORE = 8
ANYWHERE = 16
"""So many processes are started on any machine, and so many for each of its cores, without being asked for."""


def check_ranks(setup: Setup, settings: Settings, outside: OutsideRanks | None, command: str) -> None:
    """Whether there are as many ranks as the mesh has, or this machine can start them.

    `command` is what torchrun would have to start. Raises PlanError and LaunchError.
    """
    world = setup.mesh.world_size
    if outside is None and setup.device == "cuda":
        check_gpus(world, command)
    elif outside is None:
        check_processes(world, settings.max_cpu_ranks or MOST, command)
        if settings.max_cpu_ranks is None:
            _check_cores(world)
    elif outside.world_size != world:
        message = (
            f"the mesh has {world} ranks ({setup.mesh}), {outside.launcher} started {outside.world_size}"
        )
        span = setup.origins.span("parallel.mesh") or Span("<configuration>")
        help = f"start {world} ranks, or choose a mesh of {outside.world_size}"
        raise PlanError([Diagnostic("world-size", message, span, help)])
    elif setup.device == "cuda" and not torch.cuda.is_available():
        message = f"rank {outside.rank} was started where there is no GPU"
        raise LaunchError(message, "let CPU processes stand in for GPUs: device=cpu")


def _check_cores(world: int) -> None:
    """Raise LaunchError for many more processes than this machine has cores: it would hardly answer any more."""
    cores = len(os.sched_getaffinity(0))
    if world > max(ANYWHERE, PER_CORE * cores):
        raise LaunchError(
            f"{world} processes on {cores} core{'s' * (cores > 1)} would take the whole machine for long",
            f"to start them anyway, set launch.max_cpu_ranks={world}\n"
            "a dry run needs one process for any number of ranks: python -m parallelizer plan ...",
        )


def check_processes(world: int, most: int, command: str) -> None:
    """Raise LaunchError for more processes than one machine may start."""
    if world > most:
        nodes = math.ceil(world / most)
        while world % nodes:
            nodes += 1
        raise LaunchError(
            f"{world} ranks are more than the {most} processes that one machine is given",
            "a dry run needs one process for any number of ranks: python -m parallelizer plan ...\n"
            f"or run it on {nodes} nodes:\n  {_torchrun(nodes, world // nodes, command)}",
        )


def check_gpus(world: int, command: str) -> None:
    """Raise LaunchError for more ranks than this machine has GPUs."""
    gpus = torch.cuda.device_count()
    if world <= gpus:
        return
    per_node = max(n for n in range(1, (gpus or 8) + 1) if world % n == 0)
    nodes = world // per_node
    raise LaunchError(
        f"{world} ranks need {world} GPUs, and this machine has {gpus or 'none'}",
        f"run it on {_count(nodes, 'node')} of {_count(per_node, 'GPU')}, starting on each of them:\n"
        f"  {_torchrun(nodes, per_node, command)}\n"
        "or let CPU processes stand in for GPUs: device=cpu",
    )


def _torchrun(nodes: int, per_node: int, command: str) -> str:
    where = "--standalone" if nodes == 1 else "--rdzv-backend=c10d --rdzv-endpoint=<first node>:29500"
    share = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"  # else restarts after a kill were seen to hang
    return f"{share} torchrun --nnodes={nodes} --nproc-per-node={per_node} {where} {command}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
