"""Published runs as configurations: what their tables say, and what their frameworks do where the tables do not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import traces
from benchmarks.published.compose import FIRST_YEAR, Composed, compose, left_out
from benchmarks.published.predictions import Prepared, in_use, predict_row, prepare
from benchmarks.published.rows import Row, read
from benchmarks.published.traces import Traced
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.language.plan import Mesh
from tests.chosen import chosen
from tests.simulate.time.lines import machine

ROWS = {row.id: row for row in read()}


def said(row: Row) -> dict[str, str]:
    """The overrides by their keys."""
    return dict(one.split("=", 1) for one in compose(row).overrides)


def test_rows_are_left_out_for_experts_that_no_table_or_no_kernel_has() -> None:
    left = {name: why for name, row in ROWS.items() if (why := left_out(row)) is not None}
    names = ("nemotron-v3-ultra-550b-26-04-128", "gpt-oss-120b-64", "deepseek-v3-671b-1024")
    assert set(left) == {f"automodel-{name}" for name in names}
    assert all(why.startswith("experts: ") for why in left.values())


@pytest.mark.parametrize(
    "name", chosen([n for n, r in ROWS.items() if left_out(r) is None], ("titan2412-t5-2",))
)
def test_a_row_is_a_configuration_of_its_own_mesh_and_batch(name: str) -> None:
    row = ROWS[name]
    setup = from_config(*compose_config(list(compose(row).overrides)))
    data = row.mesh.get("dp_replicate", 1) * row.mesh.get("dp_shard", 1)
    assert setup.mesh.world_size == row.run["gpus"]
    assert setup.mesh.size("dp_replicate", "dp_shard") == data
    if row.mesh.get("pp", 1) > 1:
        assert setup.workload.batch_size == row.run["global_batch"]


def test_a_pipeline_has_the_microbatches_and_stages_of_its_framework() -> None:
    torchtitan, megatron, bridge = (
        said(ROWS[name]) for name in ("titan2412-t5-2", "megatron-119B", "bridge2604-405b-gb200-mxfp8")
    )
    key = "parallel.pipeline."
    assert torchtitan[f"{key}microbatches"] == "8" and torchtitan[f"{key}stages_per_rank"] == "2"
    assert megatron[f"{key}microbatches"] == "16" and megatron[f"{key}stages_per_rank"] == "23"
    # 126 layers cannot be divided by the 128 stages that are said: each of 64 has two, but for the first and the last.
    assert bridge[f"{key}microbatches"] == "384" and bridge[f"{key}stages_per_rank"] == "4"


def test_libraries_are_those_of_the_run() -> None:
    titan, rowwise, bridge, foundry = (
        compose(ROWS[name])
        for name in (
            "titan2412-t4-1",
            "titan2506-8b-fp8-rowwise-vanilla",
            "bridge2511-405b-h100",
            "foundry-7b-2048-8",
        )
    )
    assert [one.flash_2 for one in (titan, rowwise, bridge, foundry)] == [True, True, False, True]
    assert [one.small_tp_gathers for one in (titan, rowwise, bridge, foundry)] == [True, False, False, False]
    assert [one.plain for one in (titan, rowwise, bridge, foundry)] == [False, False, True, True]
    assert [one.rate for one in (titan, rowwise, bridge, foundry)] == [1.0, 1.0, 1.0, FIRST_YEAR]
    assert compose(ROWS["titan2412-t2-4"]).cp_payload == 4.0 and bridge.cp_payload == 1.0
    logits = 16 * 8192 * 128256 // 8  # of a rank of tp
    assert titan.loss_bytes == (4 * 4 - 3 * 2) * logits and rowwise.loss_bytes > 0
    assert bridge.loss_bytes == foundry.loss_bytes == 0


def test_memory_in_use_is_the_peak_or_what_the_loss_holds() -> None:
    one = prepare_small(peak=100, loss_peak=90)
    assert in_use(one) == 100
    more = dataclasses.replace(one, composed=dataclasses.replace(one.composed, loss_bytes=30, kept_outputs=5))
    assert in_use(more) == 5 + 120


def prepare_small(peak: int, loss_peak: int) -> Prepared:
    """A row with these peaks and no time line."""
    traced = Traced((), peak, Mesh({"dp_shard": 1}), None, loss_peak)
    return Prepared(ROWS["titan2412-t4-1"], Composed((), "h100"), traced, (), machine(), 1)


def small(**run: Any) -> Row:
    """A run of a small model in two stages on two GPUs."""
    row = ROWS["titan2412-t6-1"]
    model = {**row.model, "layers": 4, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "vocab": 256}
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    changed = {**row.run, "mesh": mesh, "gpus": 2, "seq_len": 64, "global_batch": 4, "compile": False, **run}
    return dataclasses.replace(row, run=changed, model=model)


@pytest.mark.slow
def test_a_pipeline_waits_less_with_more_microbatches() -> None:
    """(p - 1) / (m + p - 1) of the time where stages are equal; the head makes the last one longer here."""
    few, many = (predict_row(prepare(small(global_batch=rows, micro_batch=1))) for rows in (2, 16))
    shares = [one.time.waits["bubble"] / one.time.seconds for one in (few, many)]
    assert shares[0] > 2 * shares[1] > 0
    assert many.predicted > few.predicted > 0


def test_a_dry_run_is_kept_by_what_it_is_of_and_by_the_code_that_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, elsewhere, other = (
        Composed(words, "h100")
        for words in (
            ("hydra.searchpath=[file:///a]", "model=x"),
            ("hydra.searchpath=[file:///b]", "model=x"),
            ("hydra.searchpath=[file:///a]", "model=y"),
        )
    )
    before = traces.file_of(one, tmp_path)
    assert before == traces.file_of(elsewhere, tmp_path) != traces.file_of(other, tmp_path)
    monkeypatch.setattr(traces, "_recorded_by", lambda: "another")
    assert traces.file_of(one, tmp_path) != before
