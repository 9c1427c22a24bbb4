"""A training's whole life from the wheel, in an empty folder: new, validate, plan, verify, train, kill, resume, sample."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.wheel.installed import ROOT, Installed

STEPS, EVERY = 12, 3
TRAIN = (
    *("python", "-m", "recipes.train", "parallel=fsdp2_tp2", f"train.steps={STEPS}", "train.batch_size=4"),
    *(f"train.checkpoint_every={EVERY}", "train.seq_len=64", "train.eval_batches=1", "device=cpu"),
    *("optim.lr=3e-3", "hydra.run.dir=runs/first", "data=text", "data.path=text.py"),
)


def measured(folder: Path) -> list[dict[str, float]]:
    """The whole lines of a run's metrics."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def killed_behind(step: int, installed: Installed, here: Path) -> None:
    """Train, and SIGKILL the command and all of its ranks once that step is there."""
    running = subprocess.Popen(
        [str(installed.python), *TRAIN[1:]],
        cwd=here,
        env=installed.environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    patience = time.monotonic() + 120
    try:
        while len(measured(here / "runs/first")) < step:
            assert running.poll() is None and time.monotonic() < patience
            time.sleep(0.02)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@pytest.mark.ranks
def test_from_nothing_to_a_sample(installed: Installed, tmp_path: Path) -> None:
    def run(*words: str, cwd: Path = tmp_path / "training", expected: int = 0) -> str:
        status, out = installed.run(*words, cwd=cwd)
        assert status == expected, out
        assert "Traceback" not in out
        return out

    out = run("parallelizer", "new", "training", cwd=tmp_path)
    here = tmp_path / "training"
    assert "cd training" in out
    (here / "text.py").write_text((ROOT / "parallelizer/configuration/setup.py").read_text())

    common = ["--config-dir", "conf", "parallel=fsdp2_tp2"]
    out = run("parallelizer", "validate", *common)
    valid, proof = out.splitlines()
    assert valid == "conf/plans/my_gpt.yaml on dp_shard=2 x tp=2: valid" and proof.startswith(
        "proof: proven in "
    )
    out = run("parallelizer", "validate", *common, 'rules=["blocks.*.upp: colwise"]', expected=1)
    assert "did you mean `blocks.*.up`" in out
    document = json.loads(run("parallelizer", "plan", *common, "--json"))
    assert document["world_size"] == 4 and document["memory"]["peak"] > 0
    out = run("parallelizer", "verify", *common, "model.layers=1")
    assert "proven: the sharded run equals the unsharded one" in out

    killed_behind(STEPS // 2, installed, here)
    before = measured(here / "runs/first")
    out = run(*TRAIN)
    assert re.search(r"step_\d+", out)
    after = measured(here / "runs/first")
    assert [line["step"] for line in after] == list(range(1, STEPS + 1))
    # What was done again came to the same, to the bit.
    assert [line["loss"] for line in after[: len(before)]] == [line["loss"] for line in before]
    assert after[-1]["loss"] < after[0]["loss"]

    sampled = run(
        "python", "-m", "recipes.generate", "checkpoint=runs/first", "prompt=def ", "max_new_tokens=8"
    )
    assert "def " in sampled
