"""What the recipe does about the proof of a run, before a rank starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import Mesh
from parallelizer.proof import duration, quick
from parallelizer.proof.certificate import find, write
from parallelizer.proof.compare import Difference, ProofVerdict
from parallelizer.proof.proof import Proof
from parallelizer.proof.validate import Looked
from parallelizer.simulate.validate import Validation
from parallelizer.styles.application import Program
from parallelizer.training.data.corpus import Data
from parallelizer.training.job.job import Job
from parallelizer.training.job.proof import prove_first
from parallelizer.training.settings import Settings
from tests.proof.test_certificate import certificate

Findings = tuple[Diagnostic, ...]

WRONG = 'rules=["layers.*.ffn_norm: {none: params}"]'


Compiled = tuple[Setup, nn.Module, Program]


def compiled(*overrides: str, force: bool = False) -> Compiled:
    setup = from_overrides(list(overrides))
    model = setup.build_model()
    return setup, model, setup.compile(model, force=force)


def asked(
    compiled: Compiled, folder: Path, prove: str = "auto", *, alone: bool = True, found: Findings = ()
) -> tuple[str, str | None, Findings]:
    """`prove_first` of a job, of which validation has found so much."""
    setup, model, program = compiled
    settings = Settings(prove=prove, proofs=str(folder))
    job = Job(setup, program, settings, Data(torch.empty(0), torch.empty(0), 0, 0.0), folder)
    return prove_first(job, Looked(Validation(found), find(setup, model, folder)), alone=alone)


@pytest.fixture(scope="module")
def tp2() -> Compiled:
    return compiled("parallel=tp2")


def never_called(*args: Any, **options: Any) -> Proof:
    raise AssertionError("it must not prove")


@pytest.mark.ranks
def test_it_proves_once_and_finds_the_certificate_from_then_on(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, name, _ = asked(tp2, tmp_path)
    assert line.startswith("proven in ") and name is not None
    monkeypatch.setattr(quick, "prove_tiny", never_called)
    again, same, _ = asked(tp2, tmp_path, "always", alone=False)
    assert again.startswith("proven on ") and same == name


@pytest.mark.ranks
def test_a_run_whose_proof_fails_is_refused(tmp_path: Path) -> None:
    wrong = compiled("parallel=tp2", WRONG, force=True)
    with pytest.raises(PlanError) as raised:
        asked(wrong, tmp_path)
    [found] = raised.value.diagnostics
    assert found.code == "not-equal" and found.message.startswith("the run is refused, because the proof")
    assert not list(tmp_path.iterdir())


def test_a_certificate_that_cannot_be_written_does_not_stop_a_proven_run(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = ProofVerdict((Difference("gradient", "w", 0, 0.1, 0.5),), 1.0)
    proof = Proof("plan", tp2[0].mesh, "float64", verdict, (1.0, 1.0))
    monkeypatch.setattr(quick, "why_not_within", lambda *args, **options: None)
    monkeypatch.setattr(quick, "prove_tiny", lambda *args, **options: proof)
    (tmp_path / "file").touch()
    line, name, _ = asked(tp2, tmp_path / "file" / "proofs")
    assert line.startswith("proven in 0 s (worst error 0.20 of its bound); the certificate ")
    assert line.endswith(".json cannot be written: Not a directory") and name is None


def test_always_refuses_a_run_without_a_certificate(tp2: Compiled, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as raised:
        asked(tp2, tmp_path, "always")
    assert raised.value.diagnostics[0].code == "not-proven"


def test_never_goes_on_and_says_so(tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "prove_tiny", never_called)
    assert asked(tp2, tmp_path, "never") == (
        "not proven (train.prove=never)",
        None,
        (),
    )


def test_ranks_that_others_started_only_look(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "prove_tiny", never_called)
    line, name, _ = asked(tp2, tmp_path, alone=False)
    assert line.startswith("not proven: another launcher started its ranks") and name is None


def test_what_takes_long_is_not_proven_first(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "prove_tiny", never_called)
    monkeypatch.setattr(duration, "FLOPS", 1.0)
    line, *_ = asked(tp2, tmp_path)
    assert "should take about" in line and "parallelizer verify" in line


def test_what_changed_since_the_last_proof_is_told(tp2: Compiled, tmp_path: Path) -> None:
    setup, model, program = tp2
    write(certificate(setup), tmp_path)
    other = dataclasses.replace(setup, model={**setup.model, "rope_theta": 7.0})
    line, *_ = asked((other, model, program), tmp_path, "never")
    assert line == "not proven since the model's configuration changed (2026-01-02) (train.prove=never)"


def test_one_rank_needs_no_proof(tp2: Compiled, tmp_path: Path) -> None:
    setup, model, program = tp2
    single = dataclasses.replace(setup, mesh=Mesh({}))
    assert asked((single, model, program), tmp_path, "always")[1] is None


UNSURE = Diagnostic("needs-whole", "`flip` needs all of dimension 1")


@pytest.mark.ranks
def test_a_finding_that_a_check_is_not_sure_of_is_settled_by_the_proof(tp2: Compiled, tmp_path: Path) -> None:
    line, _, (found,) = asked(tp2, tmp_path, found=(UNSURE,))
    assert line.startswith("proven in ") and (found.code, found.severity) == ("needs-whole", "note")


@pytest.mark.parametrize(("prove", "alone"), [("never", True), ("auto", False)])
def test_without_a_proof_it_is_a_warning(tp2: Compiled, tmp_path: Path, prove: str, alone: bool) -> None:
    _, _, (found,) = asked(tp2, tmp_path, prove, alone=alone, found=(UNSURE,))
    assert (found.code, found.severity) == ("needs-whole", "warning")


@pytest.mark.parametrize("alone", [True, False])
def test_without_a_proof_halves_of_a_batch_are_compared(
    alone: bool, tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`never` trains nevertheless."""
    monkeypatch.setattr(duration, "FLOPS", 1.0)
    monkeypatch.setattr(quick, "unequal_halves", lambda subject: Diagnostic("not-equal", "mixed"))
    with pytest.raises(PlanError) as raised:
        asked(tp2, tmp_path, alone=alone)
    (found,) = raised.value.diagnostics
    assert found.message.endswith("for halves of a batch: mixed") and "train.prove=never" in (
        found.help or ""
    )
    assert asked(tp2, tmp_path, "never")[1] is None


def test_what_a_proof_does_not_cover_is_told(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = ProofVerdict((Difference("gradient", "w", 0, 0.1, 0.5),), 1.0)
    changes = ("tp 8 -> 2", "layers.7 left out, no layer of the small model does the same")
    proof = Proof("plan", tp2[0].mesh, "float64", verdict, (1.0, 1.0), changes=changes, one_sided=("a.py:1",))
    monkeypatch.setattr(quick, "why_not_within", lambda *args, **options: None)
    monkeypatch.setattr(quick, "prove_tiny", lambda *args, **options: proof)
    line, *_ = asked(tp2, tmp_path)
    assert (
        "not covered" in line and "1 layers or rules are left out, 1 decision by values took one side" in line
    )
