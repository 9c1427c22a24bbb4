"""Whether this process has used CUDA, and how to ask for GPUs without using it.

A process that has initialised CUDA's driver must not fork: a forked child cannot use the driver, and torch's backward,
which starts a thread for every GPU, ends it. The question for GPUs initialises the driver, unless torch asks NVML.
Imports no torch: commands answer before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_VISIBLE = "CUDA_VISIBLE_DEVICES"

_NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED, the answer of every function of the driver before `cuInit`."""


def ask_by_nvml() -> None:
    """From now on `torch.cuda.is_available()` asks NVML, which leaves this process free to fork. A value that the user
    gave the variable stays.
    """
    os.environ.setdefault(_BY_NVML, "1")


def hide_gpus() -> None:
    """Let this process see no GPU. For a new process: one that has counted its GPUs remembers them."""
    os.environ[_VISIBLE] = ""


@contextlib.contextmanager
def gpus_hidden() -> Iterator[None]:
    """Let processes that are started inside see no GPU. This process keeps those that it uses."""
    before = os.environ.get(_VISIBLE)
    hide_gpus()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


def must_not_fork() -> bool:
    """Whether CUDA was initialised in this process, or before the fork that made it. `torch.cuda.is_initialized` knows only
    what torch's Python side has done. A call of `is_available`, or a backward on the CPU of a machine with GPUs,
    initialises the driver too, so the driver is asked as well.
    """
    if (torch := sys.modules.get("torch")) is None:
        return _driver_initialised()
    from parallelizer import torch_private

    return torch.cuda.is_initialized() or torch_private.forked_after_cuda() or _driver_initialised()


def _driver_initialised() -> bool:
    try:
        # Only if it is loaded already: what is not loaded was not initialised.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except (OSError, AttributeError):  # not loaded; a system that is not Linux
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALISED)
