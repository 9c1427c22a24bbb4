"""Tables from a package of measurements that is made here, in the form of `aiconfigurator-core`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from parallelizer.simulate.time.installed_kernels import LENGTHS, derived, installed
from parallelizer.simulate.time.kernel_table import load_table, parse_table

parquet = pytest.importorskip("pyarrow.parquet")
import pyarrow  # noqa: E402

SIZES = (128, 256)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Products of 1 ms in each of three frameworks, attention of 2 ms, gathers of 3 ms."""
    gpu = tmp_path / "aiconfigurator_core" / "systems" / "data" / "h100_sxm"
    (tmp_path / "aiconfigurator_core" / "__init__.py").parent.mkdir(parents=True)
    (tmp_path / "aiconfigurator_core" / "__init__.py").touch()
    gemms = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 1.0}
        for m, n, k in itertools.product(SIZES, SIZES, SIZES)
    ]
    for framework in ("vllm", "sglang", "trtllm"):
        write(gpu / "gemm" / framework / "1.0" / "gemm_perf.parquet", gemms)
    attention = [{"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "batch_size": 8, "num_heads": 16, "isl": n,
                  "head_dim": 128, "latency": 2.0} for n in LENGTHS]  # fmt: skip
    write(gpu / "attention" / "vllm" / "1.0" / "context_attention_perf.parquet", attention)
    gathers = [
        {"nccl_dtype": "half", "op_name": "all_gather", "num_gpus": 8, "message_size": 2**n, "latency": 3.0}
        for n in range(9, 29)
    ]
    write(gpu / "comm" / "nccl" / "2.29.2" / "nccl_perf.parquet", gathers)
    return gpu.parent


def test_times_become_rates(data: Path) -> None:
    table = parse_table(derived("h100", data))
    # 128^3 at whole TFLOP/s is rounded to nothing; the largest takes its millisecond.
    assert table.attention_tflops(8192, 128) == pytest.approx(
        2 * 8 * 16 * 8192**2 * 128 / 2e-3 / 1e12, rel=0.01
    )
    assert table.collective_seconds("all_gather", 8, 1 << 20) == pytest.approx(3e-3)
    assert set(table.gemm) == {"bfloat16"}


def test_an_installed_package_is_found_and_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(data.parents[2]))
    assert installed() == data
    load_table.cache_clear()
    assert load_table("installed:h100").collective_seconds("all_gather", 8, 1 << 20) == pytest.approx(3e-3)


def test_a_gpu_that_the_package_has_not_is_named(data: Path) -> None:
    with pytest.raises(ValueError, match="called abacus"):
        derived("abacus", data)
    with pytest.raises(FileNotFoundError, match="a100_sxm"):
        derived("a100", data)
