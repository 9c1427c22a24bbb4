"""The table of pipelines; `python -m benchmarks.proofs pipelines` runs all of it.

The default run has one cell of each kind of model, `make test-all` every model, and every schedule on every mesh.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.proofs.__main__ import main
from benchmarks.proofs.pipelines import (
    PRESETS,
    PipelineCell,
    document,
    grid,
    markdown,
    models,
    prove,
    rows,
    summary,
)
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from tests.chosen import chosen, values

pytest.importorskip("transformers", reason="the optional extra `hf`")

CELLS = grid()
ONE_A_KIND = [
    ("encoder_decoder_tiny", "pp2", "zbv"),
    ("vit_tiny", "pp2", "gpipe"),
    ("hf_llama_packed", "pp2", "interleaved-1f1b"),
    ("hf_gemma2", "pp2", "dualpipev"),  # one rank has both copies of the tied embedding
    ("hf_qwen3_moe", "pp2", "interleaved-zero-bubble"),
    ("llama_debug", "pp4", "1f1b"),
]
"""Every schedule, each with another kind of model."""


def some() -> list[tuple[str, str, str]]:
    """Every model in a cell, and every schedule on every mesh in one."""
    kept = [(model, (preset, schedule)) for model, preset, schedule in ONE_A_KIND]
    every = values([(model, (preset, schedule)) for model, preset, schedule in CELLS], kept)
    return [(model, *of) for (model, of) in (param.values[0] for param in every)]


@pytest.mark.ranks
@pytest.mark.parametrize("of", chosen(some(), ONE_A_KIND), ids=lambda of: f"{of[0]} {of[2]} on {of[1]}")
def test_a_cell_is_proven(of: tuple[str, str, str]) -> None:
    cell = prove(*of)
    assert cell.passed, cell.reason


def test_the_table_has_every_shipped_model_and_every_schedule() -> None:
    assert set(models()) == {path.stem for path in (config_folder() / "model").glob("*.yaml")} - {"hf"}
    for model in models():
        assert {(p, s) for m, p, s in CELLS if m == model} == {(p, s) for p in PRESETS for s in SCHEDULES}
    assert {schedule for _, _, schedule in ONE_A_KIND} == set(SCHEDULES)


def test_the_table_has_every_shipped_plan_with_a_whole_stream_on_presets_with_tp() -> None:
    plans = {row.partition(", ")[2]: row for row in rows() if ", " in row}
    assert set(plans) == {path.stem for path in (config_folder() / "plans").glob("*_tp.yaml")}
    for row in plans.values():
        assert {preset for r, preset, _ in CELLS if r == row} == {"pp2_tp2", "pp2_fsdp2_tp2"}


def cells() -> list[PipelineCell]:
    return [
        *(PipelineCell("a", "pp2", schedule, 0.25, passed=True) for schedule in SCHEDULES),
        PipelineCell("a", "pp4", "1f1b", 0.5, passed=True),
        PipelineCell("a", "pp4", "zbv", None, refused=True, reason="why not (plan.yaml:3)"),
        PipelineCell("b", "pp2", "zbv", 3.0, reason="the gradient differs"),
        PipelineCell("b", "pp4", "zbv", 3.0, reason="the gradient differs"),
    ]


def test_a_cell_names_the_schedules_that_are_proven_and_the_rest_is_below() -> None:
    text = markdown(cells())
    assert "| a | all (0.25) | 1f1b (0.50) |" in text and "| b | not equal | not equal |" in text
    assert "- a, zbv on pp4: refused. why not (plan.yaml:3)" in text
    assert "- b, zbv on pp2, zbv on pp4: not equal. the gradient differs" in text
    assert summary(cells()).startswith("7 of 10 cells are proven, 1 are refused with a finding, 2 fail")
    assert document(cells())["passed"] is False and document(cells()[:8])["passed"] is True


def test_kept_cells_make_the_table_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, page = tmp_path / "cells.jsonl", tmp_path / "page.md"
    row = {"model": "hf_opt", "preset": "pp2", "schedule": "zbv", "share": 0.5, "passed": True}
    kept.write_text(json.dumps(row) + "\n")
    page.write_text("<!-- pipelines:begin -->\n<!-- pipelines:end -->\n")
    assert main(["pipelines", "--cells", str(kept), "--kept", "--write", str(page)]) == 0
    assert "| hf_opt | zbv (0.50) |" in page.read_text() and "1 of 1 cells" in capsys.readouterr().out
