"""Kernel tables from NVIDIA's measurements in `aiconfigurator-core` (Apache-2.0), as the extra `kernels` installs them.

Each table has times in a form that pricing interpolates: products of matrices on a grid of sizes, attention by the length of
the sequence, collectives inside a node by bytes. `benchmarks/kernel_tables.py` ships them as JSON.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

M = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
NK = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SOURCE = "derived from the measurements of aiconfigurator-core, (c) NVIDIA, Apache-2.0: see NOTICE"
ELEMENTS = tuple(2**n for n in range(9, 29))

GEMMS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "bfloat16": (("vllm", "sglang", "trtllm"), "bfloat16"),  # all three call torch.nn.functional.linear
    "float8": (("trtllm",), "fp8"),  # cuBLASLt with one scale for a tensor, as torch._scaled_mm
    "float8_rowwise": (("vllm",), "fp8"),  # CUTLASS
    "float4": (("trtllm",), "nvfp4"),
}
"""The frameworks and the dtype whose measurements stand for one of ours; of several the median counts, since single machines
were throttled.
"""

GPUS: Mapping[str, tuple[str, str, str]] = {
    "a100": ("a100_sxm", "nccl/2.27.3", "vllm"),
    "h100": ("h100_sxm", "nccl/2.29.2", "vllm"),
    "h200": ("h200_sxm", "nccl/2.29.2", "vllm"),
    "b200": ("b200_sxm", "nccl/2.29.2", "trtllm"),
    "gb200": ("gb200", "nccl/2.29.2", "trtllm"),
    "gb300": ("gb300", "nccl/2.29.2", "trtllm"),
}
"""The folder of a GPU, of its collectives, and the framework whose attention is taken."""


def _rows(files: Iterable[Path]) -> Iterable[dict[str, Any]]:
    import pyarrow.parquet as parquet

    for file in files:
        yield from parquet.read_table(file).to_pylist()


Size = tuple[int, int, int]


def _times(folder: Path, frameworks: Iterable[str], dtype: str) -> dict[Size, float]:
    """Milliseconds by (m, n, k), the median over frameworks."""
    found: dict[Size, list[float]] = {}
    for framework in frameworks:
        for row in _rows(sorted(folder.glob(f"gemm/{framework}/*/gemm_perf.parquet"))[-1:]):
            if row["gemm_dtype"] == dtype and row["m"] in M and row["n"] in NK and row["k"] in NK:
                found.setdefault((row["m"], row["n"], row["k"]), []).append(row["latency"])
    return {size: statistics.median(each) for size, each in found.items()}


def _gemms(folder: Path) -> dict[str, Any]:
    tables = {}
    whole = _times(folder, *GEMMS["bfloat16"])
    for dtype, (frameworks, theirs) in GEMMS.items():
        times = _times(folder, frameworks, theirs)
        if not times:
            continue
        if dtype != "bfloat16":
            times = _without_casts(times, whole, 0.22 if dtype == "float4" else 0.45)
        # What the table lacks, its neighbours stand for when it is read.
        m, nk = ([x for x in grid if any(x == key[i] for key in times)] for grid, i in ((M, 0), (NK, 1)))
        values = [
            [
                [round(2 * a * b * c / times[a, b, c] / 1e9) if (a, b, c) in times else 0 for c in nk]
                for b in nk
            ]
            for a in m
        ]
        tables[dtype] = {"m": m, "n": nk, "k": nk, "tflops": values}
    return tables


def _without_casts(
    times: Mapping[Size, float], whole: Mapping[Size, float], least_share: float
) -> dict[Size, float]:
    """The times of the products alone: what was measured in 8 and 4 bits includes the cast of the left factor.

    The cast depends on m and k. Where n is least, the product is small beside it, and taken for half of bfloat16's.
    """
    least = min(n for _, n, _ in times)
    alone = {}
    for (m, n, k), time in times.items():
        if (m, least, k) not in times or (m, n, k) not in whole:
            continue
        cast = max(0.0, times[m, least, k] - whole.get((m, least, k), 0.0) / 2)
        # The difference of two measurements is bounded by what the rates of the dtypes allow.
        lowest = least_share * whole[m, n, k]
        alone[m, n, k] = min(max(time - cast, lowest), max(whole[m, n, k], lowest))
    return alone


def _attention(folder: Path, framework: str) -> dict[str, Any]:
    """Causal attention in bfloat16, forward: TFLOP/s of the half that the mask leaves, by head size and length."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in _rows(sorted(folder.glob(f"attention/{framework}/*/context_attention_perf.parquet"))[-1:]):
        plain = not row.get("window_size") and not row.get("step")
        if row["attn_dtype"] != "bfloat16" or row["kv_cache_dtype"] != "bfloat16" or not plain:
            continue
        batch, heads, length, size = (row[k] for k in ("batch_size", "num_heads", "isl", "head_dim"))
        if length in LENGTHS and batch * heads * length >= 32768:
            rate = 2 * batch * heads * length**2 * size / row["latency"] / 1e9
            found.setdefault((size, length), []).append(rate)
    sizes = sorted({size for size, _ in found})
    return {
        str(size): [round(statistics.median(found[size, n]), 1) for n in LENGTHS if (size, n) in found]
        for size in sizes
        if all((size, n) in found for n in LENGTHS)
    }


def _collectives(folder: Path) -> dict[str, Any]:
    """Microseconds of each kind by ranks, at the bytes of the whole tensor."""
    found: dict[str, dict[str, list[float]]] = {}
    rows = [r for r in _rows(folder.glob("nccl_perf.parquet")) if r["nccl_dtype"] == "half"]
    for kind, theirs in (("all_gather", "all_gather"), ("reduce_scatter", "reduce_scatter"),
                         ("all_reduce", "all_reduce"), ("all_to_all", "alltoall")):  # fmt: skip
        for ranks in (2, 4, 8):
            times = {
                r["message_size"]: r["latency"]
                for r in rows
                if (r["op_name"], r["num_gpus"]) == (theirs, ranks)
            }
            if times:
                found.setdefault(kind, {})[str(ranks)] = [
                    round(times[e] * 1e3, 1) for e in ELEMENTS if e in times
                ]
    return {"bytes": [2 * e for e in ELEMENTS], "microseconds": found}


def installed() -> Path:
    """The folder of the measurements in the installed package. Raises ModuleNotFoundError where it is not installed."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "aiconfigurator-core is not installed: `pip install aiconfigurator-core pyarrow`, or the extra `kernels`"
        )
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


def derived(gpu: str, data: Path) -> dict[str, Any]:
    """The table of a GPU of GPUS in its JSON form, from the measurements in the folder `data`. Raises ValueError for another GPU,
    and OSError where the folder lacks its measurements.
    """
    if gpu not in GPUS:
        raise ValueError(f"no GPU of {', '.join(GPUS)} is called {gpu}")
    folder, nccl, attention = GPUS[gpu]
    if not (data / folder).is_dir():
        raise FileNotFoundError(f"{data / folder} is not there")
    return {
        "source": SOURCE,
        "gemm": _gemms(data / folder),
        "attention": {"length": list(LENGTHS), "tflops": _attention(data / folder, attention)},
        "collectives": _collectives(data / folder / "comm" / nccl),
    }
