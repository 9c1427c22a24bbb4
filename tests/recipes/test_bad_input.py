"""What users get wrong: one message that says what, where and what to do, exit 1, and nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes.runs import command, entries, typed

# By name: the arguments, what the message names, where it points, and what it advises.
CASES: dict[str, tuple[list[str], str, str, str]] = {
    "preset": (["parallel=tp22"], "unknown-preset", "parallel=tp22", "did you mean tp2?"),
    "model": (["model=llama_debgu"], "unknown-preset", "model=llama_debgu", "did you mean llama_debug?"),
    "key": (["train.stepps=2"], "unknown-key", "train.stepps=2", "did you mean steps?"),
    "key of a preset": (["parallel.mesh.tpp=2"], "unknown-", "parallel.mesh.tpp=2", "tp"),
    "axis": (["++parallel.mesh.tpp=2"], "unknown-axis", "++parallel.mesh.tpp=2", "the axes are"),
    "style in a rule": (
        ['rules=["layers.*: chekpoint"]'], "unknown-style", "chekpoint", "did you mean checkpoint?",
    ),
    "style in a preset": (
        ["++parallel.styles.fsdpp.min_size=1"], "unknown-style", "fsdpp", "did you mean fsdp?",
    ),
    "option in a rule": (
        ['rules=["layers.*: {style: checkpoint, moode: full}"]'], "unknown-option", "moode", "mode",
    ),
    "option in a preset": (
        ["++parallel.styles.fsdp.min_sise=1"], "unknown-option", "min_sise", "min_size",
    ),
    "module in a rule": (
        ["parallel=tp2", 'rules=["layers.*.atention: checkpoint"]'],
        "unmatched-glob", "atention", "attention",
    ),
    "plan": (["plan=lama"], "plan-not-found", "plan=lama", "did you mean llama?"),
    "plan file": (["plan=./nothing.yaml"], "plan-not-found", "nothing.yaml", "looked"),
    "plan without rules": (["plan=./no_rules.yaml"], "no-rules", "no_rules.yaml:1:1", "rules"),
    "empty plan": (["plan=./empty.yaml"], "empty-file", "empty.yaml:1:1", "rules"),
    "plan that is no text": (["plan=./binary.yaml"], "yaml-syntax", "binary.yaml:1:", ""),
    "plan that is a folder": (["plan=./folder.yaml"], "", "folder.yaml", ""),
    "data path": (["data.path=/nowhere/at/all"], "data-not-found", "/nowhere/at/all", "data.path"),
    "data without a path": (["data=text"], "data-not-found", "data.path", "data.path="),
    "context length": (
        ["parallel=tp2", "train.seq_len=251"], "sequence-not-divisible", "train.seq_len=251", "252",
    ),
    "batch": (["parallel=fsdp2", "train.batch_size=15"], "batch-not-divisible", "train.batch_size=15", "16"),
    "steps": (["train.steps=0"], "wrong-type", "train.steps=0", "whole number"),
    "warm-up": (["optim.warmup=long"], "wrong-type", "optim.warmup=long", "whole number"),
    "learning rate": (["optim.lr=abc"], "wrong-type", "optim.lr=abc", "number"),
    "dtype": (["train.dtype=float3"], "unknown-value", "train.dtype=float3", "float32"),
    "float16": (["train.dtype=float16"], "gradient-underflow", "train.dtype=float16", "bfloat16"),
    "device": (["device=tpu"], "unknown-value", "device=tpu", "cpu"),
    "more ranks than a machine is given": (
        ["parallel=fsdp1024_cp2_tp8", "device=cpu", "train.batch_size=1024"],
        "16384 ranks", "64 processes", "python -m parallelizer plan",
    ),
    "more ranks than GPUs": (
        ["parallel=fsdp8_tp8", "device=cuda"],
        "64 ranks need 64 GPUs", "torchrun --nnodes=8 --nproc-per-node=8", "device=cpu",
    ),
    "folder of configuration": (["--config-dir", "/nowhere"], "config-not-found", "/nowhere", "--config-dir"),
    "name of a configuration": (["--config-name", "trian"], "config-not-found", "trian", "train"),
    "interpolation": (["train.steps=${nothing}"], "interpolation", "train.steps", ""),
    "dry run": (["plan=lama", "dry_run=true"], "plan-not-found", "plan=lama", "llama"),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with plans that are none."""
    (tmp_path / "no_rules.yaml").write_text("version: 1\nrules: {}\n")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.yaml").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_one_message_and_nothing_left(name: str, here: Path) -> None:
    arguments, what, where, advice = CASES[name]
    before = entries(here)
    ended = typed(*arguments, cwd=here)
    assert ended.status == 1, ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err and "HYDRA_FULL_ERROR" not in ended.err
    assert what in ended.err and where in ended.err and advice in ended.err
    assert len(re.findall(r"^error", ended.err, re.MULTILINE)) == 1, ended.err
    assert entries(here) == before


def test_an_override_that_does_not_parse_is_a_usage_error(here: Path) -> None:
    before = entries(here)
    ended = typed("parallel=[tp2", cwd=here)
    assert ended.status == 2
    assert "override-syntax" in ended.err and "parallel=[tp2" in ended.err
    assert entries(here) == before


def test_several_mistakes_are_told_at_once(here: Path) -> None:
    ended = typed("train.steps=0", "train.seed=-1", "optim.warmup=x", cwd=here)
    assert ended.status == 1
    for key in ("train.steps", "train.seed", "optim.warmup"):
        assert f"{key} is" in ended.err
    assert "3 errors" in ended.err


def test_a_folder_that_was_there_is_left_as_it_was(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "notes.txt").write_text("mine")
    assert typed("hydra.run.dir=run", "train.steps=0", cwd=here).status == 1
    assert typed("hydra.run.dir=.", "train.steps=0", cwd=here).status == 1
    assert (here / "run" / "notes.txt").read_text() == "mine"
    assert (here / "no_rules.yaml").exists()


def test_a_sweep_that_cannot_be_composed_leaves_no_folder(here: Path) -> None:
    before = entries(here)
    ended = typed("-m", "parallel=single,tp22", cwd=here)
    assert ended.status == 1
    assert "unknown-preset" in ended.err and "Traceback" not in ended.err
    assert entries(here) == before


def test_the_command_says_what_validate_says(here: Path) -> None:
    """Once as people type it, with all imports."""
    trained = command("-m", "recipes.train", "parallel=tp22", cwd=here)
    validated = command("-m", "parallelizer", "validate", "parallel=tp22", cwd=here)
    assert trained.status == validated.status == 1
    assert trained.err == validated.err
    assert "unknown-preset" in trained.err
    assert not (here / "outputs").exists()


def test_an_output_folder_that_is_a_file_is_told(here: Path) -> None:
    (here / "taken").touch()
    ended = typed("hydra.run.dir=taken", "train.steps=1", cwd=here)
    assert ended.status == 1 and "Traceback" not in ended.err
    assert ended.err.startswith("error: the output folder cannot be made: taken: File exists")
