"""Binds a rank to the cores of the NUMA node that its GPU is attached to.

Elsewhere a launch of a kernel, and a copy from the host's memory, cross the link between two processors. torch binds ranks
with `torchrun --numa-binding=node` and with `NumaOptions`. Both fail where the program `numactl` is not installed, and
serve only processes that torch's agent starts. Slurm's ranks are not of these.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

SWITCH = "PARALLELIZER_NUMA_BINDING"
"""The variable of the environment that says `0` where ranks are not to be bound."""

_SYSTEM = Path("/sys")


def bind_to_node_of(gpus: list[str], own: int, system: Path = _SYSTEM) -> int:
    """Bind all threads of this process to the cores of the node of `gpus[own]`, and return how many of `gpus` hang on
    this node.

    `gpus` are the PCI addresses of the GPUs of all ranks on this machine, by local rank; several ranks may have the same.
    `system` is the folder where Linux describes the machine. Nothing changes, and the result is `len(gpus)`, if
    - the process may not use all cores of the machine: the user, Slurm, `torchrun --numa-binding` or a container has
      chosen them;
    - the variable `SWITCH` is `0`;
    - Linux does not know the node, or the cores of the node are all cores.
    """
    allowed = os.sched_getaffinity(0)
    nodes = [_node(gpu, system) for gpu in gpus]
    cores = _cores(system / f"devices/system/node/node{nodes[own]}/cpulist")
    if (
        os.environ.get(SWITCH) == "0"
        or allowed != _cores(system / "devices/system/cpu/online")
        or not cores < allowed
        or not cores
    ):
        return len(gpus)
    os.sched_setaffinity(0, cores)
    # Threads that are there already. Later ones take the cores of the thread that starts them.
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended meanwhile
            if os.sched_getaffinity(thread) == allowed:
                os.sched_setaffinity(thread, cores)
    return nodes.count(nodes[own])


def address(gpu: int) -> str:
    """The PCI address of a GPU that this process sees, as Linux writes it. Initialises CUDA."""
    found: Any = torch.cuda.get_device_properties(gpu)  # torch's stub lacks these names
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _node(gpu: str, system: Path) -> int:
    """-1 where Linux does not know it, as on many machines with one node."""
    try:
        return int((system / "bus/pci/devices" / gpu / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _cores(file: Path) -> set[int]:
    """The cores of a list like `0-23,96-119`; none if there is no such file."""
    try:
        parts = file.read_text().strip().split(",")
        bounds = [[int(core) for core in part.split("-")] for part in parts if part]
    except (OSError, ValueError):
        return set()
    return {core for first, *last in bounds for core in range(first, (last or [first])[0] + 1)}
