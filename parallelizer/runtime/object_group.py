"""Groups for what is not a tensor of the step: objects, and the messages of checkpoints.

NCCL takes tensors on GPUs only. A world of NCCL has one group of gloo beside it, over all ranks, for both; the mesh's axes
have none. By default a group of gloo connects every rank to every other. In this group a rank connects to those that it
exchanges messages with: two neighbours to gather objects, in a world of any size. Rank 0 connects to all when a checkpoint is
saved. A world of gloo carries objects itself, and a group for each `Checkpoints` the messages of its thread.

Checkpoints are written in a thread beside the training. Two threads must not use one group at the same time, since
their messages would meet in another order on another rank. So the main thread waits until the thread has ended.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = 1800.0
"""Seconds that a message may take, because ranks write files between two of them."""


@dataclass
class _Groups:
    world: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None
    threads: list[threading.Thread] = field(default_factory=list)


_made = _Groups()


def carries_objects() -> bool:
    """Whether the default group takes tensors on the CPU, as which objects travel."""
    return "cpu:" in dist.get_backend_config()


def object_group() -> dist.ProcessGroup | None:
    """The group for objects of the main thread: None, which is the default group, where that takes them.

    Collective over the world at its first call. Waits for threads that use the group.
    """
    if not dist.is_initialized() or carries_objects():
        return None
    group = _gloo()
    _wait()
    return group


def background_group(timeout: float) -> dist.ProcessGroup | None:
    """A group for threads that `lend` starts, whose messages take `timeout` seconds at most; None without other ranks.
    Collective over the world.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if carries_objects():
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return _gloo()


def lend(thread: threading.Thread) -> None:
    """Start a thread that uses its `background_group`, after those that use the same. Collective: every rank starts one at the
    same place of its program.
    """
    if dist.is_initialized() and not carries_objects():
        _wait()
        _made.threads.append(thread)
    thread.start()


def _wait() -> None:
    """Wait until no thread uses the group of objects."""
    waiting, _made.threads = _made.threads, []
    for thread in waiting:
        thread.join()


def _gloo() -> dist.ProcessGroup | None:
    world = dist.group.WORLD
    if _made.world is not world:  # the group of another world was destroyed with it
        _made.world, _made.threads = world, []
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connect when the first message is sent
        _made.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
        # Connect to both neighbours while every rank is here: to connect to a rank that has ended takes several timeouts.
        dist.all_reduce(torch.zeros(1, device="cpu"), group=_made.group)
    return _made.group
