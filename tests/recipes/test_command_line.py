"""`python -m recipes.train` as its users know it: Hydra, torchrun, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "model.n_layers=1",
    "model.dim=64",
    "model.hidden_dim=64",
    "train.seq_len=64",
    "train.batch_size=4",
    "train.eval_batches=1",
)


def recipe(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "recipes.train", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=180)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def ranks_left() -> list[str]:
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True
    ).stdout.splitlines()
    return [line for line in listed if "recipes.train" in line and "marker.of.this.test" in line]


@pytest.mark.ranks
def test_a_run_writes_one_folder_with_its_configuration_and_metrics(tmp_path: Path) -> None:
    done = recipe(tmp_path, "parallel=tp2", "train.steps=2", *QUICK)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").glob("*/*")
    assert (folder / ".hydra" / "config.yaml").read_text().count("dp_shard: 1") == 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {"loss", "grad_norm", "tokens_per_second"} <= set(lines[0])
    assert f"outputs in {folder.relative_to(tmp_path)}" in done.stdout
    assert "mesh  2 ranks: tp=2" in done.stdout
    assert done.stdout.count("step 2/2") == 1
    assert not (tmp_path / "multirun").exists()


@pytest.mark.ranks
def test_a_sweep_runs_presets_and_plans(tmp_path: Path) -> None:
    done = recipe(tmp_path, "-m", "parallel=single,tp2", "plan=llama,llama_tp", "train.steps=1", *QUICK)
    assert done.returncode == 0, done.stderr
    folders = sorted((tmp_path / "multirun").glob("*/*/[0-9]"))
    assert [f.name for f in folders] == ["0", "1", "2", "3"]
    losses = {json.loads((f / "metrics.jsonl").read_text())["loss"] for f in folders}
    assert max(losses) - min(losses) < 1e-5


def test_hydra_shows_the_configuration_without_running(tmp_path: Path) -> None:
    shown = recipe(tmp_path, "--cfg", "job", "parallel=tp8_cp2")
    assert shown.returncode == 0
    assert "cp: 2" in shown.stdout
    assert "tp: 8" in shown.stdout
    assert "parallel/tp8_cp2" in recipe(tmp_path, "--info", "defaults", "parallel=tp8_cp2").stdout
    completion = recipe(tmp_path, "--shell-completion", "install=bash")
    assert completion.returncode == 0
    assert "complete" in completion.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_and_leaves_nothing(tmp_path: Path) -> None:
    done = recipe(tmp_path, "parallel=tp8_cp2", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "mesh  16 ranks: cp=2 x tp=8" in done.stdout
    assert "collectives" in done.stdout
    assert "peak" in done.stdout
    assert list(tmp_path.iterdir()) == []


MISTAKES = {
    "a misspelt preset": (("parallel=tp8_cp3",), ("unknown-preset", "tp8_cp2")),
    "a misspelt key": (("train.stepz=3",), ("unknown-key", "did you mean steps")),
    "a misspelt style": (('rules=["layers.*: colwize"]',), ("unknown-style", "colwise")),
    "a misspelt axis": (("++parallel.mesh.tpp=2",), ("unknown-axis", "tp")),
    "a misspelt option": (
        ('rules=["output: {style: colwise, outptu: replicate}"]',),
        ("unknown-option", "output"),
    ),
    "a misspelt plan": (("plan=lama",), ("plan-not-found", "llama")),
    "a plan that is empty": (("plan=./empty.yaml",), ("empty-file", "empty.yaml")),
    "a plan without rules": (("plan=./none.yaml",), ("no-rules", "none.yaml")),
    "a plan that is a folder": (("plan=./folder.yaml",), ("folder.yaml", "")),
    "a data path that does not exist": (("data.path=/nowhere",), ("data-not-found", "/nowhere")),
    "a length that the mesh cannot split": (
        ("parallel=cp4", "train.seq_len=100"),
        ("sequence-not-divisible", "train.seq_len="),
    ),
    "a batch that does not divide": (
        ("parallel=fsdp4", "train.batch_size=6"),
        ("batch-not-divisible", "train.batch_size="),
    ),
    "no steps": (("train.steps=0",), ("train.steps", "whole number")),
    "more ranks than can be had": (
        ("parallel=fsdp1024_cp2_tp8", "train.seq_len=1024", "train.batch_size=1024", "device=cpu"),
        ("16384 ranks", "torchrun"),
    ),
    "more ranks than GPUs": (("parallel=tp4", "device=cuda"), ("4 GPUs", "device=cpu")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_message_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    arguments, words = MISTAKES[name]
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "none.yaml").write_text("version: 1\n")
    (tmp_path / "folder.yaml").mkdir()
    before = sorted(p.name for p in tmp_path.iterdir())
    done = recipe(tmp_path, *arguments)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_an_override_that_does_not_parse_exits_with_2(tmp_path: Path) -> None:
    done = recipe(tmp_path, "train.steps=[1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
def test_under_torchrun_the_ranks_that_are_there_are_joined(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = recipe(tmp_path, "parallel=tp2", "train.steps=2", *QUICK, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mesh  2 ranks") == 1
    (folder,) = (tmp_path / "outputs").glob("*/*")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    wrong = recipe(tmp_path, "parallel=tp4", *QUICK, launcher=launcher)
    assert wrong.returncode != 0
    assert wrong.stderr.count("error[world-size]") == 1


@pytest.mark.ranks
def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "recipes.train",
        "parallel=fsdp2_tp2",
        "train.steps=100000",
        *QUICK,
        "+marker.of.this.test=1",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if " 3/100000 " in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode not in (0, None)
        assert "Traceback" not in errors
        deadline = time.monotonic() + 10
        while ranks_left() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert ranks_left() == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
