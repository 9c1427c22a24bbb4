"""What the recipe does about the proof of a run, before a rank starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.proof import duration, quick
from parallelizer.proof.certificate import write
from parallelizer.proof.compare import Difference, ProofVerdict
from parallelizer.proof.prove import Proof
from parallelizer.styles.application import Program
from parallelizer.training.job.proof import prove_first
from parallelizer.training.settings import Settings
from tests.proof.test_certificate import certificate

WRONG = 'rules=["layers.*.ffn_norm: {none: params}"]'


Compiled = tuple[Setup, nn.Module, Program]


def compiled(*overrides: str, force: bool = False) -> Compiled:
    setup = from_overrides(list(overrides))
    model = setup.build_model()
    return setup, model, setup.compile(model, force=force)


@pytest.fixture(scope="module")
def tp2() -> Compiled:
    return compiled("parallel=tp2")


def settings(folder: Path, prove: str = "auto") -> Settings:
    return Settings(prove=prove, proofs=str(folder))


def never_called(*args: Any, **options: Any) -> Proof:
    raise AssertionError("it must not prove")


@pytest.mark.ranks
def test_it_proves_once_and_finds_the_certificate_from_then_on(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, name = prove_first(*tp2, settings(tmp_path), alone=True)
    assert line.startswith("proven in ") and name is not None
    monkeypatch.setattr(quick, "prove_small", never_called)
    again, same = prove_first(*tp2, settings(tmp_path, "always"), alone=False)
    assert again.startswith("proven on ") and same == name


@pytest.mark.ranks
def test_a_run_whose_proof_fails_is_refused(tmp_path: Path) -> None:
    wrong = compiled("parallel=tp2", WRONG, force=True)
    with pytest.raises(PlanError) as raised:
        prove_first(*wrong, settings(tmp_path), alone=True)
    [found] = raised.value.diagnostics
    assert found.code == "not-equal" and found.message.startswith("the run is refused, because the proof")
    assert not list(tmp_path.iterdir())


def test_a_certificate_that_cannot_be_written_does_not_stop_a_proven_run(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = ProofVerdict((Difference("gradient", "w", 0, 0.1, 0.5),), 1.0)
    proof = Proof("plan", tp2[0].mesh, "float64", verdict, (1.0, 1.0))
    monkeypatch.setattr(quick, "why_not_within", lambda seconds, small: None)
    monkeypatch.setattr(quick, "prove_small", lambda *args: proof)
    (tmp_path / "file").touch()
    line, name = prove_first(*tp2, settings(tmp_path / "file" / "proofs"), alone=True)
    assert line.startswith("proven in 0 s (worst error 0.20 of its bound); the certificate ")
    assert line.endswith(".json cannot be written: Not a directory") and name is None


def test_always_refuses_a_run_without_a_certificate(tp2: Compiled, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as raised:
        prove_first(*tp2, settings(tmp_path, "always"), alone=True)
    assert raised.value.diagnostics[0].code == "not-proven"


def test_never_goes_on_and_says_so(tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "prove_small", never_called)
    assert prove_first(*tp2, settings(tmp_path, "never"), alone=True) == (
        "not proven (train.prove=never)",
        None,
    )


def test_ranks_that_others_started_only_look(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "prove_small", never_called)
    line, name = prove_first(*tp2, settings(tmp_path), alone=False)
    assert line.startswith("not proven: its ranks were started from outside") and name is None


def test_what_takes_long_is_not_proven_first(
    tp2: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "prove_small", never_called)
    monkeypatch.setattr(duration, "FLOPS", 1.0)
    line, _ = prove_first(*tp2, settings(tmp_path), alone=True)
    assert "should take about" in line and "parallelizer verify" in line


def test_what_changed_since_the_last_proof_is_told(tp2: Compiled, tmp_path: Path) -> None:
    setup, model, program = tp2
    write(certificate(setup), tmp_path)
    other = dataclasses.replace(setup, model={**setup.model, "rope_theta": 7.0})
    line, _ = prove_first(other, model, program, settings(tmp_path, "never"), alone=True)
    assert line == "not proven since the model's configuration changed (2026-01-02) (train.prove=never)"


def test_one_rank_needs_no_proof(tp2: Compiled, tmp_path: Path) -> None:
    setup, model, program = tp2
    single = dataclasses.replace(setup, mesh=Mesh({}))
    assert prove_first(single, model, program, settings(tmp_path, "always"), alone=True)[1] is None
