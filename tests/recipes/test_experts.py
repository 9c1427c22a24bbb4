"""The recipe trains a mixture whose experts are shared out as one rank does; it is killed, goes on without ep, and is sampled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.job.prepare import prepare
from parallelizer.training.job.run import started
from recipes import train
from tests.recipes.runs import ROOT, metrics

pytest.importorskip("transformers", reason="the optional extra `hf`")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 10
TOLERANCE = 1e-5
"""Of each step's loss, relative to the loss of one rank."""

SETTINGS = (
    "model=hf_qwen3_moe", "model.config.hidden_size=64", "model.config.head_dim=16",
    "model.config.num_attention_heads=4", "model.config.num_key_value_heads=2", "model.config.moe_intermediate_size=32",
    "train.seq_len=32", "train.batch_size=8", "train.eval_batches=1", f"train.steps={STEPS}", "train.log_every=0",
    f"data.path={ROOT / 'LICENSE'}", "device=cpu", "train.prove=never", "train.compare=false", "optim.warmup=2",
)  # fmt: skip


def losses(folder: Path, *overrides: str) -> list[float]:
    job = prepare(*compose_config([*SETTINGS, *overrides]), folder)
    ranks = job.setup.mesh.world_size
    launch.start(
        started, (train.train, job), ranks=ranks, device="cpu", start_timeout=300, collective_timeout=300
    )
    return [row["loss"] for row in metrics(folder)]


def worst(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("single"), "parallel=single")


@pytest.mark.parametrize("preset", ["fsdp4_ep4", "fsdp2_ep4_tp2"])
def test_losses_are_those_of_one_rank(preset: str, one_rank: list[float], tmp_path: Path) -> None:
    assert one_rank[-1] < one_rank[0] - 0.3
    assert worst(losses(tmp_path, f"parallel={preset}"), one_rank) <= TOLERANCE


def test_a_run_that_is_killed_goes_on_without_ep_and_is_sampled(
    one_rank: list[float], tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoints"
    shared = (*SETTINGS, f"train.checkpoint_dir={saved}", "train.checkpoint_every=2")
    _kill_after(tmp_path, saved, *shared, "parallel=fsdp4_ep4")
    before = metrics(tmp_path)
    assert before and before[-1]["step"] < STEPS
    on = tmp_path / "on"
    resumed = _command("train", f"hydra.run.dir={on}", *shared, "parallel=single", cwd=ROOT)
    assert resumed.returncode == 0, resumed.stderr
    done = [row["loss"] for row in metrics(on) if row["step"] > before[-1]["step"]]
    assert "saved on dp_shard=4 x ep=4" in resumed.stdout
    assert 0 < len(done) < STEPS and worst(done, one_rank[-len(done) :]) <= TOLERANCE
    sampled = _command(
        "generate", f"checkpoint={saved}", "parallel=single", "prompt=The", "max_new_tokens=8", cwd=tmp_path
    )
    assert sampled.returncode == 0, sampled.stderr
    assert "The" in sampled.stdout


def _kill_after(folder: Path, saved: Path, *overrides: str) -> None:
    """Start the command in a session of its own, and kill all of its processes when it has saved."""
    command = [sys.executable, "-m", "parallelizer", "train", f"hydra.run.dir={folder}", *overrides]
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 400
        while (
            not list(saved.glob("step_[0-9]/manifest.json"))
            and running.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.02)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    _, said = running.communicate()
    assert running.returncode == -signal.SIGKILL, said


def _command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallelizer", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
