"""`export`: what it prints, and its exit status."""

from __future__ import annotations

import pytest

from parallelizer.commands.main import main


def test_the_command_prints_the_code_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "parallel=fsdp2_tp2", "train.seq_len=64"]) == 0
    out = capfd.readouterr().out
    compile(out, "parallel.py", "exec")
    assert "Written by `python -m parallelizer export parallel=fsdp2_tp2 train.seq_len=64`." in out
    assert main(["export", "parallel=fsdp2_tp3"]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "error[unknown-preset]" in captured.err
