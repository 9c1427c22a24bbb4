"""Starts ranks by forking: a few milliseconds each, because torch is imported already."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A child hangs in its first parallel operation if its parent has run one.
torch.set_num_threads(1)


def run_ranks(worker: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """What `worker(rank, *args)` returned on each of `ranks` gloo processes. Raises if one of them did not."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        children = []
        for rank in range(ranks):
            children.append(_fork(_rank, Path(folder, f"result{rank}"), worker, rank, ranks, store, args))
        return [_result(child, Path(folder, f"result{rank}")) for rank, child in enumerate(children)]


def run_child(worker: Callable[..., Any], *args: Any) -> Any:
    """What `worker(*args)` returned in a process of its own, for what must not be done in this one."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result")
        return _result(_fork(worker, file, *args), file)


def _rank(worker: Callable[..., Any], rank: int, ranks: int, store: str, args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    return worker(rank, *args)


def _fork(worker: Callable[..., Any], file: Path, *args: Any) -> int:
    child = os.fork()
    if child:
        return child
    try:
        try:
            result = (False, worker(*args))
        except BaseException:
            result = (True, traceback.format_exc())
        file.write_bytes(pickle.dumps(result))
    finally:
        os._exit(0)


def _result(child: int, file: Path) -> Any:
    os.waitpid(child, 0)
    if not file.exists():
        raise RuntimeError("a child ended without a result")
    failed, result = pickle.loads(file.read_bytes())
    if failed:
        raise RuntimeError(f"a child failed:\n{result}")
    return result
