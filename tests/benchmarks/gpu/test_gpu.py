"""The script of a GPU's first hour, with small sizes on a CPU."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import several_ranks
from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.cases import RUNNING, Case, Where, run, side_by_side
from tests.benchmarks.gpu.functions import failing, sleeping


def test_a_case_that_fails_keeps_its_rows_and_says_why(tmp_path: Path) -> None:
    found = run(Case("fails", failing), Where("cpu", True, tmp_path / "fails"), 60)
    assert found.rows == [{"a": 1}] and "on purpose" in found.failure


def test_cases_side_by_side_keep_their_order_and_end_with_the_command(tmp_path: Path) -> None:
    cases = [Case(str(seconds), sleeping, (seconds,)) for seconds in (0.5, 0.0, 600.0, 600.0)]
    outcomes = side_by_side(lambda case: run(case, Where("cpu", True, tmp_path / case.name), 60), cases, 2)
    assert [next(outcomes).rows, next(outcomes).rows] == [[{"slept": 0.5}], [{"slept": 0.0}]]
    began = time.perf_counter()
    outcomes.close()
    assert time.perf_counter() - began < 30 and not RUNNING


def test_a_part_writes_tables_and_what_it_had_no_time_for(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--part", "3", "--only", "8B tp8", "--output", str(tmp_path)]) == 0
    [case] = json.loads((tmp_path / "part3.json").read_text())
    assert case["rows"][0]["rank"] == "0 of 8" and "as planned" in case["rows"][0]["collectives"]
    assert "| 0 of 8 |" in (tmp_path / "part3.md").read_text()
    assert (
        main(
            [
                "--device",
                "cpu",
                "--part",
                "3",
                "--minutes",
                "0",
                "--only",
                "8B tp8",
                "--output",
                str(tmp_path),
            ]
        )
        == 1
    )
    assert "not started" in (tmp_path / "part3.md").read_text()


def test_a_proof_that_a_release_of_torch_cannot_make_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: list[str] = []

    def ran(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        called.append(command[-1])
        return subprocess.CompletedProcess(command, 0, "proven", "")

    monkeypatch.setattr(subprocess, "run", ran)
    cases = {case.name: case.arguments for case in PARTS[2]}
    compiled, eager = cases["verify compiled fsdp2_tp2"], cases["verify fsdp2_tp2"]
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert [*several_ranks.verified(Where("cpu", True, tmp_path), *compiled)] == [
        {"not run": "torch 2.11.0+cu130 cannot compile attention in float64 on a CPU"}
    ]
    assert not called
    [*several_ranks.verified(Where("cpu", True, tmp_path), *eager)]
    [*several_ranks.verified(Where("cuda", True, tmp_path), *compiled)]
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    [*several_ranks.verified(Where("cpu", True, tmp_path), *compiled)]
    assert called == [eager[-1], compiled[-1], compiled[-1]]


def test_the_speed_of_every_recipe_of_float8_stands_beside_bfloat16() -> None:
    named = {case.name: case.arguments for case in PARTS[4] if "float8" in case.name}
    assert {name.rpartition("compiled ")[2] for name in named} == {
        "without float8", "float8 tensorwise", "float8 rowwise", "float8 rowwise-gw-hp", "float8 tensorwise gathered",
    }  # fmt: skip
    # They differ in their rules alone.
    assert len({arguments[:-1] for arguments in named.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise-gw-hp", "tensorwise gathered"])
def test_float8_runs_on_a_cpu(recipe: str, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--part", "4", "--only", f"float8 {recipe}", "--output", str(tmp_path)]
    assert main(words) == 0
    [case] = json.loads((tmp_path / "part4.json").read_text())
    row = case["rows"][0]
    assert row["rank"] == "0 of 8" and row["device s"] > 0 and int(row["graphs"].partition("+")[0]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_whole_part_runs_on_a_cpu(part: int, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--part", str(part), "--minutes", "20", "--output", str(tmp_path)]
    main(words)
    failed = {
        c["name"]: c["failure"]
        for c in json.loads((tmp_path / f"part{part}.json").read_text())
        if c["failure"]
    }
    assert failed == {}
