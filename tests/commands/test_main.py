"""`python -m parallelizer`: what it prints, where, and the status it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallelizer.commands.main import main
from tests.recipes.runs import ROOT, command

Captured = pytest.CaptureFixture[str]


def test_validate_says_that_a_plan_is_valid(capsys: Captured) -> None:
    assert main(["validate", "parallel=tp8_cp2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("llama.yaml on cp=2 x tp=8: valid\n")
    assert printed.err == ""


def test_validate_says_what_is_wrong_on_stderr(capsys: Captured) -> None:
    assert main(["validate", "parallel=tp2", "train.seq_len=255"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error[sequence-not-divisible]" in printed.err and printed.err.endswith("1 error\n")


def test_validate_in_json(capsys: Captured) -> None:
    assert main(["validate", "--json", "parallel=fsdp2_cp2_tp2"]) == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "diagnostics": []}
    assert main(["validate", "--json", "parallel=tp22"]) == 1
    printed = capsys.readouterr()
    [found] = json.loads(printed.out)["diagnostics"]
    assert found["code"] == "unknown-preset" and printed.err == ""


def test_validate_notes_rules_that_do_nothing_on_this_mesh(capsys: Captured) -> None:
    assert main(["validate", "parallel=fsdp4"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("on dp_shard=4: valid\n") and "note[idle-rule]" in printed.err


def test_overrides_stand_anywhere(capsys: Captured) -> None:
    assert main(["validate", "parallel=tp2", "--json", "train.seq_len=255"]) == 1
    assert json.loads(capsys.readouterr().out)["valid"] is False


def test_plan_prints_tables_and_the_step(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "parallel=fsdp2_tp2"]) == 0
    out = capfd.readouterr().out
    for part in (
        "mesh  4 ranks: dp_shard=2 x tp=2",
        "parameters of rank 0",
        "modules",
        "collectives",
        "memory of",
    ):
        assert part in out


def test_plan_in_json_for_any_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--rank", "3", "parallel=fsdp2_tp2"]) == 0
    made = json.loads(capfd.readouterr().out)
    assert made["rank"] == 3 and made["world_size"] == 4
    assert made["collectives"] and made["memory"]["peak"] > 0


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_a_rank_that_is_not_there(rank: str, capsys: Captured) -> None:
    assert main(["plan", f"--rank={rank}", "parallel=fsdp2_tp2"]) == 1
    assert "ranks are 0 to 3" in capsys.readouterr().err


def test_a_plan_that_is_wrong_is_not_printed(capsys: Captured) -> None:
    assert main(["plan", "parallel=tp2", "train.seq_len=255"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "sequence-not-divisible" in printed.err
    assert main(["plan", "--json", "plan=lama"]) == 1
    [found] = json.loads(capsys.readouterr().out)["diagnostics"]
    assert found["code"] == "plan-not-found"


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["validate", "--nothing"], ["plan", "--rank=x"], ["plan", "parallel=[tp2"]]
)
def test_a_command_line_that_does_not_parse(arguments: list[str], capsys: Captured) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:  # as argparse ends
        status = end.code  # type: ignore[assignment]
    assert status == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "error" in printed.err and "Traceback" not in printed.err


def test_a_folder_and_a_root_configuration_of_one_s_own(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "ours.yaml").write_text("defaults: [base]\nmesh: {tp: 4}\n")
    (tmp_path / "ours.yaml").write_text("defaults: [train, _self_]\ntrain: {seq_len: 128}\n")
    arguments = ["--config-dir", str(tmp_path), "--config-name", "ours"]
    assert main(["validate", *arguments, "parallel=ours"]) == 0
    assert "on tp=4: valid" in capsys.readouterr().out
    assert main(["validate", *arguments, "parallel=ours", "train.seq_len=127"]) == 1


def test_a_model_is_found_in_the_working_directory(tmp_path: Path) -> None:
    """And the command runs as people type it."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\nclass Mine(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Embedding(256, 8), nn.Linear(8, 256))\n"
    )
    (tmp_path / "plan.yaml").write_text('version: 1\nrules:\n  "": fsdp\n')
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(
        "_target_: mine.Mine\nplan: ./plan.yaml\nloss: parallelizer.losses.cross_entropy\n"
        "batch: {input: {shape: [batch, sequence]}, labels: {shape: [batch, sequence]}}\n"
    )
    arguments = ["--config-dir", "conf", "model=mine", "parallel=fsdp2"]
    ended = command("-m", "parallelizer", "validate", *arguments, cwd=tmp_path)
    assert ended.status == 0, ended.err
    assert ended.out.endswith("plan.yaml on dp_shard=2: valid\n")


@pytest.mark.parametrize(
    "words",
    [
        ("parallelizer", "explain", "layers.0.attention.wq", "parallel=tp2"),
        ("recipes.train", "dry_run=true", "parallel=tp22"),
    ],
)
def test_a_reader_who_has_gone_ends_a_command_quietly(words: tuple[str, ...], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(tmp_path / "err", "w+") as err:
        refused = "parallel=tp22" in words  # which is said on stderr
        ended = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            stdout=write,
            stderr=write if refused else err,
            check=False,
        )
        os.close(write)
        err.seek(0)
        assert ended.returncode == 141 and err.read() == ""
