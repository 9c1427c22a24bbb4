"""What the recipe does about the proof of a run, before a rank starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.proof import duration
from parallelizer.proof.prove import Proof
from parallelizer.styles.application import Program
from parallelizer.training.job import proof as proofs
from parallelizer.training.job.proof import prove_first
from parallelizer.training.settings import Settings
from tests.proof.test_certificate import certificate

WRONG = 'rules=["layers.*.ffn_norm: {none: params}"]'


def compiled(*overrides: str, force: bool = False) -> tuple[Setup, Program]:
    setup = from_overrides(list(overrides))
    return setup, setup.compile(setup.build_model(), force=force)


@pytest.fixture(scope="module")
def tp2() -> tuple[Setup, Program]:
    return compiled("parallel=tp2")


def settings(folder: Path, prove: str = "auto") -> Settings:
    return Settings(prove=prove, proofs=str(folder))


def never_called(*args: Any, **options: Any) -> Proof:
    raise AssertionError("it must not prove")


@pytest.mark.ranks
def test_it_proves_once_and_finds_the_certificate_from_then_on(
    tp2: tuple[Setup, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, name = prove_first(*tp2, settings(tmp_path), alone=True)
    assert line.startswith("proven in ") and name is not None
    monkeypatch.setattr(proofs, "prove_small", never_called)
    again, same = prove_first(*tp2, settings(tmp_path, "always"), alone=False)
    assert again.startswith("proven on ") and same == name


@pytest.mark.ranks
def test_a_run_whose_proof_fails_is_refused(tmp_path: Path) -> None:
    setup, program = compiled("parallel=tp2", WRONG, force=True)
    with pytest.raises(PlanError) as raised:
        prove_first(setup, program, settings(tmp_path), alone=True)
    [found] = raised.value.diagnostics
    assert found.code == "not-equal" and found.message.startswith("the run is refused, because the proof")
    assert not list(tmp_path.iterdir())


def test_always_refuses_a_run_without_a_certificate(tp2: tuple[Setup, Program], tmp_path: Path) -> None:
    with pytest.raises(PlanError) as raised:
        prove_first(*tp2, settings(tmp_path, "always"), alone=True)
    assert raised.value.diagnostics[0].code == "not-proven"


def test_never_goes_on_and_says_so(
    tp2: tuple[Setup, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "prove_small", never_called)
    assert prove_first(*tp2, settings(tmp_path, "never"), alone=True) == (
        "not proven (train.prove=never)",
        None,
    )


def test_ranks_that_others_started_only_look(
    tp2: tuple[Setup, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "prove_small", never_called)
    line, name = prove_first(*tp2, settings(tmp_path), alone=False)
    assert line.startswith("not proven: its ranks were started from outside") and name is None


def test_what_takes_long_is_not_proven_first(
    tp2: tuple[Setup, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "prove_small", never_called)
    monkeypatch.setattr(duration, "FLOPS", 1.0)
    line, _ = prove_first(*tp2, settings(tmp_path), alone=True)
    assert "should take about" in line and "parallelizer verify" in line


def test_what_changed_since_the_last_proof_is_told(tp2: tuple[Setup, Program], tmp_path: Path) -> None:
    setup, program = tp2
    proofs.write(certificate(setup), tmp_path)
    other = dataclasses.replace(setup, model={**setup.model, "rope_theta": 7.0})
    line, _ = prove_first(other, program, settings(tmp_path, "never"), alone=True)
    assert line == "not proven since the model's configuration changed (2026-01-02) (train.prove=never)"


def test_one_rank_needs_no_proof(tp2: tuple[Setup, Program], tmp_path: Path) -> None:
    setup, program = tp2
    single = dataclasses.replace(setup, mesh=Mesh({}))
    assert prove_first(single, program, settings(tmp_path, "always"), alone=True)[1] is None
