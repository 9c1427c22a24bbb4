"""Records of collectives as torch's flight recorder writes them for ranks of NCCL."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

TORCH = str(Path(torch.__file__).parent)


def entry(
    name: str,
    number: int,
    group: str,
    *,
    state: str = "completed",
    line: int | None = 1,
    sizes: Sequence[Sequence[int]] = ((4, 2),),
    message: bool = False,
    backend: str = "nccl",
) -> dict[str, Any]:
    """One entry: of the group of an axis, called in `model.py` at a line; without stack if that is None."""
    frames = [
        {"name": "all_reduce", "filename": f"{TORCH}/distributed/distributed_c10d.py", "line": 3068},
        {"name": "forward", "filename": "/home/model.py", "line": line},
        {"name": "main", "filename": "/home/train.py", "line": 9},
    ]
    ended = state == "completed"
    made: dict[str, Any] = {
        "record_id": 0,
        "pg_id": 0,
        "process_group": (group, "default_pg" if group == "0" else f"mesh_{group}"),
        "thread_name": "python",
        "thread_id": "139649842281344",
        "collective_seq_id": 0 if message else number,
        "p2p_seq_id": number if message else 0,
        "op_id": number,
        "profiling_name": f"{backend}:{name}",
        "time_created_ns": 1795685819889730118,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": ["Float"],
        "output_sizes": [list(size) for size in sizes],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1795685819889730120 if ended else None,
        "retired": ended,
        "timeout_ms": 8000,
        "is_p2p": message,
    }
    return made if line is None else {"frames": frames, **made}


def dump(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[int]], version: str = "2.10"
) -> bytes:
    """The bytes of one rank's record, which is in these groups."""
    numbered = [{**made, "record_id": number} for number, made in enumerate(entries)]
    config = {
        name: {
            "name": name,
            "desc": numbered[0]["process_group"][1] if numbered else "",
            "ranks": str(list(ranks)),
        }
        for name, ranks in groups.items()
    }
    content = {
        "version": version,
        "pg_config": config,
        "comm_lib_version": "2.28.9",
        "pg_status": {},
        "entries": numbered,
    }
    return pickle.dumps(content, protocol=2)
