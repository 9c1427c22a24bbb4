"""Overrides, `--config-dir` and `--config-name`."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.commands.main import main

Captured = pytest.CaptureFixture[str]


def test_a_folder_and_a_root_configuration_of_one_s_own(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "ours.yaml").write_text("defaults: [base]\nmesh: {tp: 4}\n")
    (tmp_path / "ours.yaml").write_text("defaults: [train, _self_]\ntrain: {seq_len: 128}\n")
    arguments = ["--config-dir", str(tmp_path), "--config-name", "ours"]
    assert main(["validate", "--no-proof", *arguments, "parallel=ours"]) == 0
    assert "on tp=4: valid" in capsys.readouterr().out
    assert main(["validate", "--no-proof", *arguments, "parallel=ours", "train.seq_len=127"]) == 1
