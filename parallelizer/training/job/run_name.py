"""The name of a run, by which it finds its output folder again after a restart from outside.

`hydra.run.dir` reads it by `${run_name:}`. A run that starts its own ranks has the time of its start as name,
as in Hydra. After a restart by torchrun, a new rank 0 would choose another time; there the name is the start
time of torchrun. A batch job that Slurm requeues keeps its number.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from omegaconf import OmegaConf

from parallelizer.runtime.launch import slurm_step

FORMAT = "%Y-%m-%d/%H-%M-%S"


def run_name() -> str:
    """`2026-07-09/18-04-31`, or in a batch job of Slurm's `slurm-123.0-5d41402a`.

    The digits behind a step (or behind the job, outside of steps) are those of the command's arguments: a script may
    start one run after another.
    """
    job = slurm_step.stable_name(os.environ)
    if job is not None:
        return f"{job}-{_digits(sys.argv[1:])}"
    begun = agent_began() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return (begun or datetime.now()).strftime(FORMAT)


def register() -> None:
    """Let configurations say `${run_name:}`."""
    OmegaConf.register_new_resolver("run_name", run_name, use_cache=True, replace=True)


def _digits(words: Sequence[str]) -> str:
    return f"{zlib.crc32(chr(0).join(words).encode()):08x}"


def agent_began() -> datetime | None:
    """When the torch elastic agent that this process was started by began; None where the system does not tell.

    The agent is the nearest process above this one that has not got torch elastic's variables itself.
    """
    try:
        process = os.getppid()
        while b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{process}/environ").read_bytes():
            process = int(_fields(process)[1])
        ticks = int(_fields(process)[19])
        booted = next(
            line.split()[1]
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return datetime.fromtimestamp(int(booted) + ticks / os.sysconf("SC_CLK_TCK"))


def _fields(process: int) -> list[str]:
    """What `/proc/<process>/stat` says behind the name: state, parent, and so on (proc(5))."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
