"""`validate`: what it prints, where, and its exit status."""

from __future__ import annotations

import json

import pytest

from parallelizer.commands.main import main

Captured = pytest.CaptureFixture[str]


def test_validate_says_that_a_plan_is_valid(capsys: Captured) -> None:
    assert main(["validate", "--no-proof", "parallel=tp8_cp2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("llama.yaml on cp=2 x tp=8: valid\n")
    assert printed.err == ""


def test_validate_says_what_is_wrong_on_stderr(capsys: Captured) -> None:
    assert main(["validate", "--no-proof", "parallel=tp2", "train.seq_len=255"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error[sequence-not-divisible]" in printed.err and printed.err.endswith("1 error\n")


def test_validate_in_json(capsys: Captured) -> None:
    assert main(["validate", "--no-proof", "--json", "parallel=fsdp2_cp2_tp2"]) == 0
    assert json.loads(capsys.readouterr().out) == {"valid": True, "diagnostics": []}
    assert main(["validate", "--no-proof", "--json", "parallel=tp22"]) == 1
    printed = capsys.readouterr()
    [found] = json.loads(printed.out)["diagnostics"]
    assert found["code"] == "unknown-preset" and printed.err == ""


def test_validate_notes_rules_that_do_nothing_on_this_mesh(capsys: Captured) -> None:
    assert main(["validate", "--no-proof", "parallel=fsdp4"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("on dp_shard=4: valid\n") and "note[idle-rule]" in printed.err


def test_quick_and_proven_together_are_a_wrong_command_line(capsys: Captured) -> None:
    assert main(["validate", "--quick", "--proven"]) == 2
    assert capsys.readouterr().err.startswith("parallelizer validate: error: --proven needs the model")
