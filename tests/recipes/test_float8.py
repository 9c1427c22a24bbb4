"""A run in float8 stops and goes on with the same losses; its checkpoints serve runs without float8 and on other meshes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipes.runs import SMALL, metrics, run_here, typed

pytest.importorskip("torchao", reason="float8 needs torchao")

RULES = (
    'rules=["layers.*.{attention.w[qkvo],feed_forward.w[123]}: {style: float8, recipe: tensorwise}",'
    ' "layers.*: {style: fsdp, gather: float8}"]'
)
SIZES = ("train.checkpoint_every=2",)
FROM = 2
"""The step of the checkpoint that every other run goes on from."""


def losses(folder: Path, behind: int = 0) -> list[float]:
    return [one["loss"] for one in metrics(folder) if "loss" in one and one["step"] > behind]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_that_stopped_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_here(whole, *SIZES, "parallel=fsdp2", RULES, "train.steps=4")
    run_here(stopped, *SIZES, "parallel=fsdp2", RULES, "train.steps=2")
    run_here(stopped, *SIZES, "parallel=fsdp2", RULES, "train.steps=4")
    assert losses(stopped) == losses(whole) and len(losses(whole)) == 4


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [(("parallel=fsdp2", RULES), ("parallel=tp2",)), (("parallel=tp2",), ("parallel=fsdp2", RULES))],
    ids=["from float8", "to float8"],
)
def test_a_checkpoint_has_nothing_of_float8(
    first: tuple[str, ...], second: tuple[str, ...], tmp_path: Path
) -> None:
    """The other run goes on as one without float8 would, up to what float8 rounds."""
    run_here(tmp_path / "one", *SIZES, *first, f"train.steps={FROM}")
    shutil.copytree(tmp_path / "one", tmp_path / "same")
    run_here(tmp_path / "one", *SIZES, *second, "train.steps=4")
    run_here(tmp_path / "same", *SIZES, *first, "train.steps=4")
    other, same = (losses(tmp_path / name, FROM) for name in ("one", "same"))
    assert len(other) == 2
    for a, b in zip(other, same, strict=True):
        assert 0 < abs(a - b) < 0.01 * b


@pytest.mark.ranks
@pytest.mark.slow
def test_the_command_trains_in_float8_on_a_cpu(tmp_path: Path) -> None:
    ended = typed(*SMALL, "parallel=fsdp2", RULES, "train.steps=2", cwd=tmp_path, timeout=120)
    assert ended.status == 0, ended.err
    assert "step 2/2" in ended.out
