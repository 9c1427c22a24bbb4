"""Interpolation on a table's points and between them."""

from __future__ import annotations

import math
import sys
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.simulate.time import installed_kernels
from parallelizer.simulate.time.kernel_table import load_table
from tests.simulate.time.lines import TABLE
from tests.simulate.time.test_predict import hardware, of, product

SHIPPED = ("a100", "h100", "h200", "b200", "gb200", "gb300")
GRID = TABLE.gemm["bfloat16"]


@pytest.mark.parametrize(
    ("size", "tflops"), [((128, 128, 128), 10), ((1024, 128, 1024), 40), ((1024,) * 3, 80)]
)
def test_a_product_on_a_point_of_the_table_takes_what_was_measured(
    size: tuple[int, int, int], tflops: int
) -> None:
    assert GRID.seconds(*size) == pytest.approx(2 * math.prod(size) / (tflops * 1e12))


def test_between_points_the_rate_is_interpolated_in_logarithms() -> None:
    half = round(math.sqrt(128 * 1024))
    assert 2 * half * 128 * 128 / GRID.seconds(half, 128, 128) == pytest.approx(
        math.sqrt(200) * 1e12, rel=0.01
    )


def test_a_dim_below_the_grid_costs_as_much_as_its_first() -> None:
    assert GRID.seconds(1, 128, 128) == GRID.seconds(128, 128, 128)


@given(st.integers(1, 1 << 18), st.integers(1, 1 << 18), st.integers(1, 1 << 18))
def test_no_product_is_faster_than_the_best_of_the_table_or_takes_no_time(m: int, n: int, k: int) -> None:
    grid = load_table("h100").gemm["bfloat16"]
    best = max(rate for plane in grid.tflops for row in plane for rate in row)
    assert grid.seconds(m, n, k) >= 2 * m * n * k / (best * 1e12) * 0.999 > 0


def test_a_point_that_was_not_measured_has_its_neighbour_s_rate() -> None:
    grid = load_table("h100").gemm["bfloat16"]
    holes = [
        (m, n, k)
        for i, m in enumerate(grid.axes[0])
        for j, n in enumerate(grid.axes[1])
        for x, k in enumerate(grid.axes[2])
        if not grid.tflops[i][j][x]
    ]
    for size in holes:
        assert 0.5 < 2 * math.prod(size) / grid.seconds(*size) / 1e12 < 1000


@pytest.mark.parametrize("gpu", SHIPPED)
def test_large_products_reach_a_plausible_share_of_the_datasheet(gpu: str) -> None:
    peak = {"a100": 312, "h100": 989, "h200": 989, "b200": 2250, "gb200": 2500, "gb300": 2500}[gpu]
    rate = 2 * 8192**3 / load_table(gpu).gemm["bfloat16"].seconds(8192, 8192, 8192) / 1e12
    assert 0.5 * peak < rate < 0.95 * peak


def test_collectives_beyond_the_table_grow_with_their_bytes_and_with_the_share_that_crosses_links() -> None:
    table = load_table("h100")
    last = table.sizes[-1]
    one = table.collective_seconds("all_gather", 8, last)
    assert one is not None
    assert table.collective_seconds("all_gather", 8, 4 * last) == pytest.approx(4 * one)
    assert table.collective_seconds("all_gather", 6, last) == pytest.approx(one * (5 / 6) / (7 / 8))
    assert table.collective_seconds("broadcast", 8, last) is None


def test_the_notice_is_shipped_with_the_tables() -> None:
    assert "Apache License" in files("parallelizer.simulate.time").joinpath("kernels", "NOTICE").read_text()


def test_shipped_tables_are_read_without_the_package_that_they_were_made_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither NVIDIA's package nor pyarrow, which the extra `kernels` brings, can be imported."""
    for name in ("aiconfigurator_core", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    load_table.cache_clear()
    found = of([product()], **hardware("h100"))
    rate = product().flops / found.seconds / 1e12
    assert found.assumed == () and 500 < rate < 800


def test_without_the_package_a_note_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_kernels.importlib.util, "find_spec", lambda name: None)
    load_table.cache_clear()
    found = of([product()], **hardware("h100", kernels="installed:h100"))
    told = " ".join(note.message for note in found.assumed)
    assert "the extra `kernels`" in told and "sizes cost as on H100" in told
