"""Several ranks on one device over NCCL, started by torchrun: their losses beside those of one rank, and what the
ranks print if one of them is stopped.

NCCL takes several ranks on one GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1. If torch brings an older one, name a newer
library in LD_PRELOAD: the package `nvidia-nccl-cu13` has it in `nvidia/nccl/lib/libnccl.so.2`. The ranks share the GPU in turns,
so their times say nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch  # noqa: F401  loads NCCL

from benchmarks.gpu.cases import Case, Row, Where, descendants
from benchmarks.gpu.memory import method_rule
from benchmarks.gpu.recipe import losses_of, row_of

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
"""Settings for ranks that share a GPU: NCCL permits it, and its kernels are small enough to run at the same time."""

ON_A_CPU = ("parallel=fsdp2_tp2",)
"""The one mesh that runs on a CPU, where its ranks meet over gloo."""

CLOSE = 1e-3
"""The largest relative difference of a loss in float32 after twelve steps."""


def trained(where: Where, ranks: int, *words: str) -> Iterator[Row]:
    """A run of several ranks, and one of a single rank: the losses of their steps are close."""
    if (left := _left_out(where)) or (where.small and words != ON_A_CPU):
        yield left or {"not run": "on a CPU gloo runs, and one mesh shows that this script does"}
        return
    os.environ.update(SHARED)
    kept = ("train.dtype=float32", *(w for w in words if w.startswith("model=")))
    yield (one := row_of(where, "one", ("parallel=single", *kept)))
    yield (several := row_of(where, "several", ("train.dtype=float32", *words), ranks=ranks))
    alone, shared = (losses_of(where.folder / name) for name in ("one", "several"))
    if one["status"] or several["status"] or not alone or len(alone) != len(shared):
        raise RuntimeError("a run failed")
    worst = max(abs(a - b) / abs(a) for a, b in zip(alone, shared, strict=True))
    yield {"steps": len(shared), "worst relative difference of a loss": f"{worst:.1e}"}
    if worst > CLOSE:
        raise RuntimeError("the losses differ")


def stuck(where: Where) -> Iterator[Row]:
    """A run of four ranks, one of which is stopped: what the others say, and whether the timeout of collectives ends them."""
    if left := _left_out(where):
        yield left
        return
    folder = where.folder / "run"
    waits = (
        {"stuck_after": 5, "collective_timeout": 12}
        if where.small
        else {"stuck_after": 10, "collective_timeout": 25}
    )
    small = ("train.seq_len=64", "train.batch_size=8") if where.small else ()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"),
        *("-m", "recipes.train", f"device={where.device}", "parallel=fsdp2_tp2", "train.steps=100000"),
        *("train.dtype=float32", *(f"launch.{name}={seconds}" for name, seconds in waits.items())),
        *(f"hydra.run.dir={folder}", *small),
    ]
    with (where.folder / "said.txt").open("w") as said:
        launcher = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **SHARED}
        )
        children: list[int] = []
        try:
            _wait(lambda: len(losses_of(folder)) >= 6 or launcher.poll() is not None, 90)
            if len(losses_of(folder)) < 6:
                raise RuntimeError("the ranks did not train six steps")
            found = ["pgrep", "-P", str(launcher.pid), "-f", "recipes.train"]
            children = [int(w) for w in subprocess.run(found, capture_output=True, text=True).stdout.split()]
            os.kill(children[-1], signal.SIGSTOP)
            since = time.perf_counter()
            _wait(lambda: launcher.poll() is not None, 90)
            ended = launcher.poll()
        finally:
            for process in (*descendants(launcher.pid), *children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            launcher.kill()
            launcher.wait()
    seconds = f"{time.perf_counter() - since:.0f}" if ended is not None else "not"
    lines = (where.folder / "said.txt").read_text().splitlines()
    wanted = ("stand", "stuck", "collective", "Timeout", "rank ", "behind")
    yield {"stopped one of": len(children), "ended by itself after s": seconds, "status": ended}
    for line in [line.strip()[:300] for line in lines if any(w in line for w in wanted)][-25:]:
        yield {"said": line}
    record = sorted(path.name for path in folder.glob("collectives_rank*"))
    yield {"said": f"records of collectives: {', '.join(record) or 'none'}"}
    if ended is None:
        raise RuntimeError("the ranks were still waiting")


def _left_out(where: Where) -> Row | None:
    if where.device != "cuda":
        return None
    # torch tells the version that it was built with, and not that of the library that was loaded.
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    version = f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"
    if number.value >= 23_000:
        return None
    return {"not run": f"NCCL {version} refuses several ranks on one GPU; LD_PRELOAD can name 2.30 or newer"}


def _wait(done: Callable[[], bool], seconds: float) -> None:
    ends = time.perf_counter() + seconds
    while not done() and time.perf_counter() < ends:
        time.sleep(0.2)


CASES = (
    Case("nccl fsdp2_tp2", trained, (4, "parallel=fsdp2_tp2"), limit=120),
    Case("nccl cp2_tp2", trained, (4, "parallel=cp2_tp2"), limit=120),
    Case("nccl cp2 ring", trained, (2, "parallel=cp2", method_rule("ring")), limit=120),
    Case("nccl cp2 ulysses", trained, (2, "parallel=cp2", method_rule("ulysses")), limit=120),
    Case("nccl hsdp2x2", trained, (4, "parallel=hsdp2x2"), limit=120),
    Case("nccl pp2_tp2", trained, (4, "parallel=pp2_tp2"), limit=120),
    Case("nccl pp2_fsdp2", trained, (4, "parallel=pp2_fsdp2"), limit=120),
    Case("nccl fsdp2_ep2 experts", trained, (2, "parallel=fsdp2_ep2", "model=hf_qwen3_moe"), limit=120),
    Case("nccl stuck rank", stuck, limit=200),
)
