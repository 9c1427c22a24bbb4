"""Where the host waits for a value of the device in a step."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from parallelizer.torch_private import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount")
"""Operators of aten whose result, or its size, the host must know at once."""


def host_reads(step: Callable[[], object], device: str) -> Mapping[str, int]:
    """The places `file:line` that make the host wait in one call of `step`, with how often. On CUDA torch itself says so; on a
    CPU, where nothing has to be waited for, the operators are counted that would.
    """
    if device != "cuda":
        places = Counter[str]()
        with _Lists(places), _Operators(places):
            step()
        return dict(places)
    places = Counter()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places.update(_place(w.filename, w.lineno) for w in said if "synchroniz" in str(w.message))
    return dict(places)


class _Lists(TorchFunctionMode):
    """`tolist`, which reads the CPU's memory without an operator."""

    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist:
            self.places[_caller()] += 1
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func._schema.name.split("::")[1] in READS:
            self.places[_caller()] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """The innermost line outside of torch and of this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _of_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return _place(frame.f_code.co_filename, frame.f_lineno)


def _of_torch(file: str) -> bool:
    return file.startswith(str(Path(torch.__file__).parent)) or file == __file__


def _place(file: str, line: int) -> str:
    parts = Path(file).parts
    return f"{'/'.join(parts[-3:])}:{line}"
