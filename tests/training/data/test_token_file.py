"""Token ids in a raw file: windows of it, and files that are none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from parallelizer.configuration.compose import compose_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training.data import windows
from parallelizer.training.data.token_file import load
from parallelizer.training.job.prepare import prepare

TOKENS = (np.arange(1000) * 37 % 50_257).astype(np.uint16)


@pytest.fixture
def path(tmp_path: Path) -> str:
    TOKENS.tofile(tmp_path / "train.bin")
    return str(tmp_path / "train.bin")


def test_batches_are_those_of_the_same_tokens_in_memory(path: str) -> None:
    source = load(path=path, heldout=0.1)
    tokens = torch.from_numpy(TOKENS.astype(np.int64))
    asked = {"batch_size": 4, "seq_len": 16}
    for position in (0, 4, 400):
        batch = source.training_batch(position, seed=3, rows=slice(1, 3), **asked)
        wanted = windows.global_batch(tokens[:900], position=position, seed=3, rows=slice(1, 3), **asked)
        assert all(torch.equal(batch[name], wanted[name]) for name in wanted)
    [held] = source.heldout_batches(count=1, **asked)
    [wanted] = windows.evaluation_batches(tokens[900:], count=1, **asked)
    assert torch.equal(held["input_ids"], wanted["input_ids"]) and held["input_ids"].dtype == torch.int64
    assert source.vocab_size == int(TOKENS.max()) + 1
    assert source.baseline.loss == pytest.approx(math.log(100))


def test_a_second_file_is_held_out(path: str, tmp_path: Path) -> None:
    TOKENS[:40].tofile(tmp_path / "val.bin")
    source = load(path=path, heldout_path=str(tmp_path / "val.bin"))
    [held] = source.heldout_batches(batch_size=2, seq_len=16, count=9)
    assert sorted(held["input_ids"][:, 0].tolist()) == sorted([int(TOKENS[0]), int(TOKENS[16])])
    with pytest.raises(PlanError, match=r"held-out part of .*val\.bin has 40 tokens"):
        source.check_fits(40)
    assert source.fingerprint() != load(path=path).fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "nowhere.bin"}, "does not exist"),
        ({"dtype": "float32"}, "token ids are uint8"),
        ({"dtype": "int64", "odd": True}, "are not a multiple of int64"),
        ({"heldout": 0.0}, "leaves a part without any"),
    ],
)
def test_what_is_no_file_of_tokens_is_refused(path: str, change: dict[str, object], message: str) -> None:
    if change.pop("odd", False):
        TOKENS[:3].tofile(path)
    with pytest.raises(PlanError, match=message):
        load(**{"path": path, **change})  # type: ignore[arg-type]


def test_tokens_that_the_model_has_no_embedding_for_are_refused(path: str) -> None:
    with pytest.raises(PlanError, match="the model's vocabulary is 256") as caught:
        prepare(*compose_config(["data=bin", f"data.path={path}", "train.seq_len=16"]), Path("nowhere"))
    assert [d.code for d in caught.value.diagnostics] == ["data-mismatch"]
