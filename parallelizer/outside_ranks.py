"""Ranks that somebody else started, torchrun or Slurm: which one this process is, and how it joins them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist

from parallelizer.own_watch import own_watch
from parallelizer.rank import Device, LaunchError, enter_group, environment

T = TypeVar("T")


@dataclass(frozen=True)
class OutsideRanks:
    """This process as one of `world_size` ranks that `launcher` started; `local_rank` counts on this node."""

    rank: int
    world_size: int
    local_rank: int
    launcher: Literal["torchrun", "slurm"]
    address: str
    port: int


def outside_ranks() -> OutsideRanks | None:
    """Whether this process was started as one of many ranks, and as which.

    Reads what torchrun (and everybody who speaks its dialect) leaves in the environment: RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT; else what srun leaves. None when neither is there, for a Slurm job of one task,
    and in an sbatch script itself, which looks like rank 0 of tasks that nobody has started. Raises
    LaunchError for a value that is no number.
    """
    env = os.environ
    if all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return OutsideRanks(
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK", 0),
            launcher="torchrun",
            address=env["MASTER_ADDR"],
            port=_number(env, "MASTER_PORT"),
        )
    if "SLURM_PROCID" not in env or "SLURM_LOCALID" not in env or _is_batch_script(env):
        return None
    # srun inside an allocation may start fewer tasks than the allocation has: the step knows how many.
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if tasks < 2:
        return None
    # Every task of a step comes to the same port, outside the range that systems hand out to clients.
    port = 10000 + (_number(env, "SLURM_JOB_ID", 0) + _number(env, "SLURM_STEP_ID", 0)) % 20000
    return OutsideRanks(
        rank=_number(env, "SLURM_PROCID"),
        world_size=tasks,
        local_rank=_number(env, "SLURM_LOCALID"),
        launcher="slurm",
        address=env.get("MASTER_ADDR") or first_host(env.get("SLURM_JOB_NODELIST", "127.0.0.1")),
        port=_number(env, "MASTER_PORT", port),
    )


def _is_batch_script(env: Mapping[str, str]) -> bool:
    return env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]  # None is caught below
    except (TypeError, ValueError):
        raise LaunchError(f"the environment variable {name} is {text!r}, which is no number") from None


def first_host(nodelist: str) -> str:
    """The first host of a Slurm host list: `gpu[007-012,020],login1` -> `gpu007`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def join(
    worker: Callable[..., T],
    args: tuple = (),
    *,
    device: Device,
    collective_timeout: float = 600.0,
    stuck_after: float = 300.0,
) -> T:
    """Run `worker(*args)` in this process as the rank that torchrun or Slurm made it; return what it returns.

    The environment holds torchrun's variables while the worker runs, under Slurm too. `collective_timeout` is
    in seconds. When the worker calls `heartbeat.beat`, and then not for `stuck_after` seconds (0 for never), this
    rank says on stderr where it stands: see `own_watch`.

    Restarts are torchrun's own. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts: the store is
    the agent's, which is another process, and shared with the ranks; after a SIGKILL restarts were seen to hang.

    Raises LaunchError when this process is no such rank. What the worker raises goes through, and
    the process group then stays as it is, because closing it would wait for ranks that may be gone.
    """
    ranks = outside_ranks()
    if ranks is None:
        raise LaunchError(
            "this process was not started as one of several ranks",
            "start it with torchrun or srun, or call `start`",
        )
    variables = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": ranks.port,
    }
    with environment({name: str(value) for name, value in variables.items()}):
        enter_group(device, ranks.local_rank, collective_timeout)
        with own_watch(ranks.rank, ranks.world_size, stuck_after):
            result = worker(*args)
        dist.destroy_process_group()
    return result
