"""Kernels in the place of torch's collectives, in one process, for tensors of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

COLLECTIVES = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
)
"""Operators of `c10d` that move tensors. Every collective of torch goes through them, functional or not."""

_kept: list[torch.library.Library] = []


def replace_collectives(kernels: Mapping[str, Callable[..., Any]], device: str) -> None:
    """Let these kernels run for the operators of `c10d` that they are named by, on tensors of a type of device, from now on. It
    cannot be undone: call it only in a process that does nothing else.
    """
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced, which is what is asked for
        for name, kernel in kernels.items():
            library.impl(name, kernel, device.upper(), allow_override=True)
    _kept.append(library)
