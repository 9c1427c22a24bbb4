"""`plan`: what it prints, where, and its exit status. Locks, comparisons and pages are tested in tests/report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelizer.commands import plan
from parallelizer.commands.main import main

Captured = pytest.CaptureFixture[str]


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
    ("option", "code"),
    [("--html", "file-unwritable"), ("--lock", "lock-not-written"), ("--locked", "lock-not-found")],
)
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    option: str, code: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the configuration was read")

    monkeypatch.setattr(plan, "read_setup", never)
    assert main(["plan", option, str(tmp_path / "no" / "x")]) == 1
    assert f"error[{code}]" in capsys.readouterr().err
