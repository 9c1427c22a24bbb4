"""A Slurm step, read from the environment of one of its tasks: the rank of the task, and the rendezvous
address.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from functools import lru_cache

PORTS = range(10000, 30000)
"""Where the ranks of a step meet: below the ports that systems hand out to clients."""


def is_batch_script(env: Mapping[str, str]) -> bool:
    """Whether this is the script of a batch job: it looks like rank 0 of tasks that were not started."""
    return env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env


def tasks_per_node(text: str) -> tuple[int, ...]:
    """`4(x2),1` -> (4, 4, 1), as SLURM_STEP_TASKS_PER_NODE writes it. Raises ValueError for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ValueError(f"{part!r} is not a number of tasks")
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def rank_by_node(nodes: tuple[int, ...], node: int, local: int) -> int:
    """The rank of the `local`-th task of node `node` when ranks are counted node by node."""
    return sum(nodes[:node]) + local


def first_host(nodelist: str) -> str:
    """The first host of a Slurm host list: `gpu[007-012,020],login1` -> `gpu007`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def first_address(env: Mapping[str, str]) -> str:
    """Where rank 0 listens: loopback for a step on one node, else the first node of the step.

    A node's name need not be a host's. Where it is none, Slurm is asked for the node's address.
    """
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    if not nodelist or env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1":
        return "127.0.0.1"
    node = first_host(nodelist)
    return node if _resolves(node) else _node_address(node) or node


@lru_cache
def _resolves(name: str) -> bool:
    """Whether a host has this name."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


@lru_cache
def _node_address(node: str) -> str | None:
    """NodeAddr of a node in Slurm's configuration; None when Slurm does not answer."""
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", node], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return found[1] if found else None


def port(env: Mapping[str, str], job: int, step: int) -> int:
    """The port that every task of a step comes to. Steps of a job and jobs that follow each other differ.

    A port that Slurm has set aside for the step is taken before any other (`srun --resv-ports`).
    """
    reserved = re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved:
        return int(reserved[0])
    return PORTS[(100 * job + step) % (len(PORTS) - 1)]


def stable_name(env: Mapping[str, str] = os.environ) -> str | None:
    """What a step, or the script itself, is called in every life of its batch job: `slurm-123.0`, `slurm-120_4`.

    None outside of batch jobs: others are never requeued.
    """
    if env.get("ENVIRONMENT") != "BATCH" or "SLURM_JOB_ID" not in env:
        return None
    job = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        job = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    step = env.get("SLURM_STEP_ID")
    return f"slurm-{job}" if step is None else f"slurm-{job}.{step}"
