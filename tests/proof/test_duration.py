"""Whether a proof is expected to be quick."""

from __future__ import annotations

import pytest

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.proof import duration
from parallelizer.proof.duration import expected_seconds, why_not_within
from parallelizer.proof.tiny import shrink, subject_of


def test_a_slow_machine_takes_longer_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(from_overrides(["parallel=tp2"]))
    assert why_not_within(1e6, subject) is None
    monkeypatch.setattr(duration, "FLOPS", 1.0)
    assert (expected_seconds(subject) or 0) > 1e6
    assert "should take about" in (why_not_within(1e6, subject) or "")


def test_more_ranks_than_a_machine_is_given_are_told_of() -> None:
    setup = from_overrides(["parallel=fsdp2", "parallel.mesh.dp_shard=128", "train.batch_size=128"])
    assert why_not_within(1e6, subject_of(setup)) == "its proof takes 128 ranks"


def test_where_values_decide_the_course_of_a_model_its_parameters_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = subject_of(shrink(from_overrides(["parallel=tp2"]))[0])
    traced = expected_seconds(subject) or 0
    monkeypatch.setattr(duration, "step_flops", lambda *args: None)
    assert traced < (expected_seconds(subject) or 0) < 60
