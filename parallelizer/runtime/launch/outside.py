"""Ranks that torchrun or Slurm started: the rank of this process, and how it joins the others."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.runtime.launch import interfaces, records, slurm_step
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.own_watch import own_watch
from parallelizer.runtime.launch.rank import Device, enter_group, environment

T = TypeVar("T")


@dataclass(frozen=True)
class OutsideRanks:
    """This process as one of `world_size` ranks that `launcher` started; `local_rank` counts on this node.

    `nodes` are the numbers of ranks on each node: ranks are counted node by node, so that the first node has the
    ranks from 0. Empty where it is not known.
    """

    rank: int
    world_size: int
    local_rank: int
    launcher: Literal["torchrun", "slurm"]
    address: str
    port: int
    nodes: tuple[int, ...] = ()


def outside_ranks() -> OutsideRanks | None:
    """Whether this process was started as one of many ranks, and as which.

    Reads what torchrun (and everybody who speaks its dialect) leaves in the environment: RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT; else what srun leaves. None when neither is there, for a Slurm job of one task,
    and in an sbatch script itself, which looks like rank 0 of tasks that were not started. Raises
    LaunchError for a value that is no number.
    """
    env = os.environ
    if all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return _of_torchrun(env)
    if "SLURM_PROCID" not in env or "SLURM_LOCALID" not in env or slurm_step.is_batch_script(env):
        return None
    # srun inside an allocation may start fewer tasks than the allocation has: the step knows how many.
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    return _of_slurm(env, tasks) if tasks > 1 else None


def _of_torchrun(env: Mapping[str, str]) -> OutsideRanks:
    world = _number(env, "WORLD_SIZE")
    local_world = _number(env, "LOCAL_WORLD_SIZE", 0)
    alike = local_world > 0 and world % local_world == 0
    return OutsideRanks(
        rank=_number(env, "RANK"),
        world_size=world,
        local_rank=_number(env, "LOCAL_RANK", 0),
        launcher="torchrun",
        address=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT"),
        nodes=(local_world,) * (world // local_world) if alike else (),
    )


def _of_slurm(env: Mapping[str, str], tasks: int) -> OutsideRanks:
    """Ranks are counted node by node, whatever `srun --distribution` was: neighbours, which talk most, share a
    node.
    """
    rank, local = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID")
    nodes: tuple[int, ...] = ()
    if "SLURM_STEP_TASKS_PER_NODE" in env:
        try:
            nodes = slurm_step.tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
        except ValueError as error:
            raise LaunchError(f"the environment variable SLURM_STEP_TASKS_PER_NODE: {error}") from None
        if sum(nodes) == tasks:
            rank = slurm_step.rank_by_node(nodes, _number(env, "SLURM_NODEID", 0), local)
        else:
            nodes = ()
    port = slurm_step.port(env, _number(env, "SLURM_JOB_ID", 0), _number(env, "SLURM_STEP_ID", 0))
    return OutsideRanks(
        rank=rank,
        world_size=tasks,
        local_rank=local,
        launcher="slurm",
        address=env.get("MASTER_ADDR") or slurm_step.first_address(env),
        port=_number(env, "MASTER_PORT", port),
        nodes=nodes,
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]  # None is caught below
    except (TypeError, ValueError):
        raise LaunchError(f"the environment variable {name} is {text!r}, which is no number") from None


def join(
    worker: Callable[..., T],
    args: tuple = (),
    *,
    device: Device,
    collective_timeout: float = 600.0,
    stuck_after: float = 300.0,
) -> T:
    """Run `worker(*args)` in this process as the rank that torchrun or Slurm made it; return what it returns.

    The environment holds torchrun's variables while the worker runs, under Slurm too; gloo is told the network
    interface that leads to the first rank, unless GLOO_SOCKET_IFNAME says which. (NCCL finds its own, several
    where there are several.) `collective_timeout` is in seconds. When the worker calls `heartbeat.beat`, and then not
    for `stuck_after` seconds (0 for never), this rank says on stderr where it stands: see `own_watch`.

    Restarts are torchrun's own. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts: the store is
    the agent's, which is another process, and shared with the ranks; after a SIGKILL restarts were seen to hang.

    Raises LaunchError when this process is no such rank, or the ranks do not meet. What the worker raises goes
    through, and the process group then stays as it is, because closing it would wait for ranks that may be gone.
    """
    ranks = outside_ranks()
    if ranks is None:
        raise LaunchError(
            "this process was not started as one of several ranks",
            "start it with torchrun or srun, or call `start`",
        )
    if device == "cuda":
        _check_gpu(ranks)
    with environment(_variables(ranks)), _listening(device) as private:
        try:
            enter_group(device, ranks.local_rank, collective_timeout, *_met_again(ranks, collective_timeout))
        except dist.DistError as error:
            reason = str(error).strip().partition("\n")[0]
            raise LaunchError(
                f"rank {ranks.rank} did not reach the other ranks at {ranks.address}:{ranks.port}: {reason}",
                "set MASTER_ADDR and MASTER_PORT to another address, the same on all ranks"
                if ranks.launcher == "slurm"
                else None,
            ) from None
        with own_watch(ranks.rank, ranks.world_size, stuck_after, private):
            result = worker(*args)
        dist.destroy_process_group()
    return result


@contextmanager
def _listening(device: Device) -> Iterator[Path | None]:
    """A folder in which this rank listens for who asks for the record of its collectives, if it is one of NCCL. The variables
    of `records` are as before afterwards: the next call in this process has other folders.
    """
    if device != "cuda":
        yield None
        return
    folder = tempfile.TemporaryDirectory(prefix="parallelizer-")
    with folder as private, environment({}, changed=records.VARIABLES):
        records.listen_in(Path(private))
        yield Path(private)


def _met_again(ranks: OutsideRanks, timeout: float) -> tuple[dist.Store, int, int] | tuple[()]:
    """After a restart by torchrun whose store the ranks share: that store, under a prefix of this attempt, since the store still
    has the addresses of the ranks that died. Where they do not share it, rank 0 makes a new store for each attempt. That needs
    no prefix, and nodes might not agree on one: an agent whose own ranks did not fail does not count the attempt.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if ranks.launcher != "torchrun" or not attempt or not shared:
        return ()
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return dist.PrefixStore(f"attempt {attempt}", store), rank, size


def leave(status: int = 0) -> NoReturn:
    """End a process that has joined others, without taking the interpreter down, as forked ranks end too.

    gloo's threads may still be letting go of tensors then, and one that needs the interpreter's lock for it
    aborts the process, whose work is done.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _variables(ranks: OutsideRanks) -> dict[str, str]:
    """What torchrun would have set, and the interface that gloo is to take."""
    variables = {
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port),
    }
    if ranks.nodes and ranks.launcher == "slurm":
        node = int(os.environ.get("SLURM_NODEID", 0))
        variables |= {"LOCAL_WORLD_SIZE": str(ranks.nodes[node]), "GROUP_RANK": str(node)}
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        if len(ranks.nodes) == 1:
            name = interfaces.loopback()
        else:
            name = interfaces.leading_to(ranks.address, several_nodes=len(ranks.nodes) > 1)
        if name is not None:
            variables["GLOO_SOCKET_IFNAME"] = name
    return variables


def _check_gpu(ranks: OutsideRanks) -> None:
    """Whether there is a GPU for this rank alone. One that is seen alone is its own (`--gpus-per-task=1`)."""
    seen = torch.cuda.device_count()
    if 1 < seen <= ranks.local_rank:
        raise LaunchError(
            f"rank {ranks.rank} is number {ranks.local_rank + 1} on its node and sees {seen} GPUs there",
            "start as many ranks on each node as it has GPUs",
        )
    if seen == 1 and ranks.rank == 0 and ranks.launcher == "slurm" and ranks.nodes and ranks.nodes[0] > 1:
        show_diagnostics.write([_alone(ranks.nodes[0])], sys.stderr, summary=False)


def _alone(local_ranks: int) -> Diagnostic:
    return Diagnostic(
        "one-gpu-seen",
        f"each of {local_ranks} ranks on a node sees one GPU only: NCCL cannot use NVLink between them",
        None,
        "let every rank see all GPUs of its node: sbatch with --gpus-per-node, not with --gpus-per-task",
        "warning",
    )
