"""`parallelizer train` and `generate` are the recipes, from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.runs import command

SMALL = (
    "device=cpu",
    "train.steps=2",
    "train.eval_batches=1",
    "train.batch_size=4",
    "train.seq_len=32",
    "train.compare=false",
)


@pytest.mark.ranks
def test_a_training_and_its_text_from_an_empty_folder(tmp_path: Path) -> None:
    ended = command(
        "-m", "parallelizer", "train", "parallel=tp2", *SMALL, "train.checkpoint_every=2", "hydra.run.dir=run",
        cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert ended.status == 0, ended.out + ended.err
    assert "trained 2 steps" in ended.out and (tmp_path / "run/metrics.jsonl").exists()
    text = command(
        "-m",
        "parallelizer",
        "generate",
        "checkpoint=run",
        "prompt=def",
        "max_new_tokens=4",
        "device=cpu",
        cwd=tmp_path,
        timeout=300,
    )
    assert text.status == 0 and "def" in text.out, text.out + text.err


def test_a_mistake_is_told_as_the_recipe_tells_it(tmp_path: Path) -> None:
    ended = command("-m", "parallelizer", "train", "parallel=tp3", cwd=tmp_path, timeout=300)
    assert ended.status == 1 and "error[" in ended.err and "Traceback" not in ended.err
