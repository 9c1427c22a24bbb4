"""Validation of a setup includes the proof of its tiny form."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallelizer as pz
from parallelizer.commands.main import main
from parallelizer.proof import validate
from parallelizer.proof.certificate import write
from parallelizer.proof.validate import Checked, check, require_proof
from tests.proof.test_certificate import certificate

pytestmark = pytest.mark.ranks

MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, centred: bool, flipped: bool):
        super().__init__()
        self.centred, self.embed, self.head = centred, nn.Embedding(32, 8), nn.Linear(8, 32)
        self.flipped = flipped

    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = x.flip(1).flip(1) if self.flipped else x
        return self.head(x - x.mean(0) if self.centred else x)

def no_number(output, batch):
    return (-output.square().sum()).sqrt(), batch["labels"].numel()
"""

CONFIG = """
_target_: net_of_rows.Net
centred: false
flipped: false
plan: net_of_rows
loss: parallelizer.losses.cross_entropy
batch:
  input_ids: {shape: [batch, sequence], dtype: int64, range: [0, 32]}
  labels: {shape: [batch, sequence], dtype: int64, range: [0, 32], ignore: -100}
"""

PLAN = "version: 1\nrules: {'': fsdp}\nbuffers: {batch: {input_ids: 1, labels: 1}}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "net_of_rows.py").write_text(MODEL)
    for name, text in (("model", CONFIG), ("plans", PLAN)):
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
    (found,) = pz.validate(mixing)
    assert (found.code, found.severity) == ("not-equal", "error")
    assert found.span is not None and Path(found.span.file).name == "net_of_rows.py" and found.span.line == 13
    assert not (Path(folder) / ".parallelizer").exists()


def test_without_a_proof_halves_of_a_batch_are_compared_in_one_process(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixing = setup(folder, "model.centred=true")
    monkeypatch.setattr(validate, "SECONDS", 0.0)
    checked = check(mixing)
    for found in (pz.validate(mixing, prove=False), checked.found):
        assert [(d.code, d.span and d.span.line) for d in found] == [("not-equal", 13)]
    assert "its proof should take about" in checked.proof
    assert not check(setup(folder)).found


def test_a_model_without_a_configuration_runs_on_halves_of_four_rows(folder: str) -> None:
    mixing = setup(folder, "model.centred=true")
    given = (mixing.build_model(), mixing.plan, {"dp_shard": 2})
    found = pz.validate(*given, workload=mixing.workload, loss=mixing.loss())
    assert [(d.code, d.span and d.span.line) for d in found if d.severity == "error"] == [("not-equal", 13)]


@pytest.mark.parametrize("proven", [True, False])
def test_a_loss_that_is_no_number_is_an_error_at_its_line(folder: str, proven: bool) -> None:
    (found,) = pz.validate(setup(folder, "model.loss=net_of_rows.no_number"), prove=proven)
    assert (found.code, found.severity) == ("model-failed", "error")
    assert found.span is not None and found.span.line == 16


def test_a_proof_leaves_a_certificate_that_the_next_validation_finds(folder: str) -> None:
    first, second = (check(setup(folder), Path("proofs")) for _ in range(2))
    assert not first.found and not second.found
    assert first.proof.startswith("proven in ") and second.proof.startswith("proven on ")


def test_on_one_rank_nothing_is_proven(folder: str) -> None:
    assert check(setup(folder, "parallel=single")).proof == "one rank: nothing to prove"


UNSURE = ("model.flipped=true", "parallel=cp2")
"""A check is not sure of this: a flip of a split sequence is an error to it, though another flip undoes it."""


def test_what_a_check_is_not_sure_of_is_a_warning_about_a_model_without_a_configuration(folder: str) -> None:
    flipped = setup(folder, *UNSURE)
    given = (flipped.build_model(), flipped.plan, {"cp": 2})
    found = pz.validate(*given, workload=flipped.workload, loss=flipped.loss())
    [one] = [d for d in found if d.code == "needs-whole"]
    assert one.severity == "warning" and "`parallelizer.testing.assert_equivalent`" in (one.help or "")


@pytest.mark.parametrize(("overrides", "code"), [((), None), (UNSURE, "needs-whole")])
def test_a_certificate_is_required_and_settles_what_a_check_is_not_sure_of(
    folder: str, overrides: tuple[str, ...], code: str | None
) -> None:
    words = ["validate", "--proven", "--json", "--config-dir", folder, "model=net_of_rows", "parallel=fsdp2"]
    proven = setup(folder, *overrides)
    assert codes(require_proof(proven, Path("proofs"))) == {"error": {"not-proven", code} - {None}}
    write(certificate(proven), Path("proofs"))
    checked = require_proof(proven, Path("proofs"))
    assert codes(checked) == ({"note": {code}} if code else {})
    assert checked.proof.startswith("proven on ")
    assert main([*words, *overrides, "--proofs", "proofs"]) == 0


def test_what_a_check_is_not_sure_of_is_a_warning_where_no_proof_is_made(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "SECONDS", 0.0)
    unsure = setup(folder, *UNSURE)
    assert codes(check(unsure)) == {"warning": {"needs-whole"}}
    (found,) = pz.validate(unsure, prove=False)
    assert (found.code, found.severity) == ("needs-whole", "warning")
    assert found.help is not None and "parallelizer verify" in found.help


def codes(checked: Checked) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in checked.found:
        found.setdefault(one.severity, set()).add(one.code)
    return found
