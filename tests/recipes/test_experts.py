"""The recipe trains a mixture whose experts are shared out as one rank; it is killed, goes on with ep=1, and is sampled."""

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
pytestmark = pytest.mark.ranks

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
    folder.mkdir(exist_ok=True)
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


def test_a_short_run_has_the_losses_of_one_rank(tmp_path: Path) -> None:
    short = ("train.steps=2", "train.batch_size=2", "train.seq_len=16")
    one = losses(tmp_path / "one", "parallel=single", *short)
    assert len(one) == 2
    assert worst(losses(tmp_path / "two", "parallel=fsdp2_ep2", *short), one) <= TOLERANCE
    for row in metrics(tmp_path / "two"):
        assert row["experts_dropped"] == 0 and row["experts_busiest"] >= 1 <= row["experts_busiest_rank"]
        assert list(row["experts"]) == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
        for one_module in row["experts"].values():
            # Two experts for each of the 2 x 16 tokens.
            assert sum(one_module["rows"]) == sum(one_module["rows_of_ranks"]) == 64
            assert [len(one_module[k]) for k in ("rows", "rows_of_ranks")] == [8, 2]


GOES_ON = {
    "fsdp4_ep4": (("parallel=fsdp4_ep4", "parallel.mesh.ep=1"), "saved on dp_shard=4 x ep=4"),
    "fsdp2_ep4_tp2": (("parallel=fsdp2_ep4_tp2", "parallel.mesh.ep=1"), "saved on dp_shard=2 x ep=4 x tp=2"),
}
"""By preset: what a run on it is gone on with after it was killed, and what that run says."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", GOES_ON)
def test_a_run_by_commands_is_killed_goes_on_with_ep_1_and_is_sampled(
    preset: str, one_rank: list[float], tmp_path: Path
) -> None:
    """All losses, before it is killed and afterwards, are those of one rank."""
    assert one_rank[-1] < one_rank[0] - 0.3
    saved = tmp_path / "checkpoints"
    shared = (*SETTINGS, f"train.checkpoint_dir={saved}", "train.checkpoint_every=2")
    _kill_after(tmp_path, saved, *shared, f"parallel={preset}")
    before = metrics(tmp_path)
    assert before and before[-1]["step"] < STEPS
    on, (overrides, says) = tmp_path / "on", GOES_ON[preset]
    resumed = _command("train", f"hydra.run.dir={on}", *shared, *overrides, cwd=ROOT)
    assert resumed.returncode == 0, resumed.stderr
    assert says in resumed.stdout
    done = {row["step"]: row["loss"] for row in [*before, *metrics(on)]}
    assert sorted(done) == list(range(1, STEPS + 1))
    assert worst([done[step] for step in sorted(done)], one_rank) <= TOLERANCE
    assert len(metrics(on)) < STEPS
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
