"""Validation of a setup includes the proof of its tiny form."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallelizer as pz
from parallelizer.proof.validate import check

pytestmark = pytest.mark.ranks

MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, centred: bool):
        super().__init__()
        self.centred, self.embed, self.head = centred, nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(x - x.mean(0) if self.centred else x)
"""

CONFIG = """
_target_: net_of_rows.Net
centred: false
plan: net_of_rows
loss: parallelizer.losses.cross_entropy
batch:
  input_ids: {shape: [batch, sequence], dtype: int64, range: [0, 32]}
  labels: {shape: [batch, sequence], dtype: int64, range: [0, 32], ignore: -100}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "net_of_rows.py").write_text(MODEL)
    for name, text in (("model", CONFIG), ("plans", "version: 1\nrules: {'': fsdp}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net_of_rows.yaml").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield str(tmp_path)
    sys.modules.pop("net_of_rows", None)


def setup(folder: str, *overrides: str) -> pz.Setup:
    return pz.from_overrides(["model=net_of_rows", "parallel=fsdp2", *overrides], config_dir=folder)


def test_a_forward_that_mixes_the_rows_of_a_rank_is_an_error(folder: str) -> None:
    """Nothing is split but the batch, and every gradient has the right shape."""
    mixing = setup(folder, "model.centred=true")
    assert not pz.validate(mixing, prove=False)
    (found,) = pz.validate(mixing)
    assert (found.code, found.severity) == ("not-equal", "error")
    assert found.span is not None and Path(found.span.file).name == "net_of_rows.py" and found.span.line == 11
    assert not (Path(folder) / ".parallelizer").exists()


def test_a_proof_leaves_a_certificate_that_the_next_validation_finds(folder: str) -> None:
    first, second = (check(setup(folder), Path("proofs")) for _ in range(2))
    assert not first.found and not second.found
    assert first.proof.startswith("proven in ") and second.proof.startswith("proven on ")


def test_on_one_rank_nothing_is_proven(folder: str) -> None:
    assert check(setup(folder, "parallel=single")).proof == "one rank: nothing to prove"
