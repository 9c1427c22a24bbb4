"""The machine: the device, the versions, and what the device can move and multiply in a second."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu.cases import Case, Row, Where
from benchmarks.gpu.timing import seconds_of


def machine(where: Where) -> Iterator[Row]:
    """Versions, memory, and the backends of attention in the order in which torch asks them."""
    yield {"fact": "torch", "value": torch.__version__}
    yield {"fact": "cores", "value": os.cpu_count()}
    if where.device != "cuda":
        return
    yield {"fact": "device", "value": torch.cuda.get_device_name()}
    yield {"fact": "cuDNN", "value": torch.backends.cudnn.version()}
    yield {"fact": "NCCL", "value": ".".join(map(str, torch.cuda.nccl.version()))}
    yield {"fact": "total GiB", "value": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2)}
    yield {"fact": "free GiB after start", "value": round(torch.cuda.mem_get_info()[0] / 2**30, 2)}


def rates(where: Where) -> Iterator[Row]:
    """Large matrix products and copies: what every other figure is held to."""
    sizes = (1024,) if where.small else (4096, 8192, 16384)
    for dtype in (torch.bfloat16, torch.float32):
        for n in sizes:
            a, b = (torch.randn(n, n, device=where.device, dtype=dtype) for _ in range(2))
            seconds = seconds_of(lambda: a @ b, where.device)  # noqa: B023
            yield {"what": f"{n}^3 product, {dtype}", "value": f"{2 * n**3 / seconds / 1e12:.1f} TFLOP/s"}
    n = 2**20 if where.small else 2**31
    a, b = (torch.empty(n, dtype=torch.uint8, device=where.device) for _ in range(2))
    seconds = seconds_of(lambda: b.copy_(a), where.device)
    yield {"what": "copy on the device, read and written", "value": f"{2 * n / seconds / 1e9:.0f} GB/s"}


def doctor(where: Where) -> Iterator[Row]:
    """What `parallelizer doctor` says."""
    told = subprocess.run([sys.executable, "-m", "parallelizer", "doctor"], capture_output=True, text=True)
    for line in told.stdout.splitlines():
        yield {"doctor": line.rstrip()}
    yield {"doctor": f"exit status {told.returncode}"}


CASES = (Case("facts machine", machine), Case("facts rates", rates), Case("facts doctor", doctor, limit=240))
