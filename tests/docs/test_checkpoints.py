"""docs/checkpoints.md is followed as it is written: a run is started, killed, and started again under another preset."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parallelizer.runtime.checkpoint.folder import steps_in
from tests.recipes.runs import ROOT, SMALL, command, metrics

TEXT = (ROOT / "docs/checkpoints.md").read_text()
FIRST, SECOND, CONVERT = re.findall(r"^\$ (.*)$", TEXT, re.M)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


def test_every_key_that_it_names_is_one_of_the_configuration() -> None:
    known = (ROOT / "configs/train.yaml").read_text()
    for key in set(re.findall(r"`(?:train|launch)\.(\w+)", TEXT)):
        assert f"\n  {key}:" in known, key


@pytest.mark.ranks
def test_a_person_can_kill_a_run_and_start_it_again_under_another_preset(tmp_path: Path) -> None:
    small = [*SMALL, "train.log_every=0"]
    words = shlex.split(FIRST)
    run = subprocess.Popen(
        [sys.executable, *words[1:], *small], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    folder = tmp_path / "runs/a/checkpoints"
    deadline = time.monotonic() + 120
    while 20 not in steps_in(folder) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL and 40 not in steps_in(folder)
    again = command(*shlex.split(SECOND)[1:], *small, cwd=tmp_path)
    assert again.status == 0, again.err
    behind = re.search(r"resuming after step (\d+) from runs/a/checkpoints/step_\1, saved on tp=2", again.out)
    assert behind is not None and int(behind[1]) >= 20
    assert [m["step"] for m in metrics(tmp_path / "runs/a")] == list(range(1, 41))
    assert steps_in(folder) == [20, 30, 40] and not list(folder.glob("*.*"))
    assert command(*shlex.split(CONVERT)[1:], cwd=tmp_path).status == 0
    assert torch.load(tmp_path / "whole.pt").keys() >= {"model", "optimizer"}
