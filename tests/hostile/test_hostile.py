"""Plans that try to execute, open or tell what they should not: all are refused, and nothing else happens."""

from __future__ import annotations

import pytest

from tests.hostile.inputs import FILES, attacks
from tests.hostile.report import Result, faults, probed


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return probed(thorough=False)


def test_there_are_many_attacks_of_every_kind() -> None:
    assert len(list(FILES.glob("*.yaml"))) >= 50
    assert len(list((FILES / "parallel").glob("*.yaml"))) >= 12
    assert len({attack.name for attack in attacks()}) == len(attacks())


def test_every_attack_is_refused_and_nothing_is_executed_opened_or_told(results: list[Result]) -> None:
    assert {result["name"] for result in results} == {attack.name for attack in attacks(thorough=False)}
    assert {result["name"]: faults(result) for result in results if faults(result)} == {}


@pytest.mark.slow
def test_every_attack_from_within_a_configuration_too() -> None:
    assert {result["name"]: faults(result) for result in probed() if faults(result)} == {}


def test_faults_are_seen() -> None:
    fine: Result = {"executed": [], "opened": [], "leaked": [], "refused": True, "seconds": 0.1}
    fine |= {"status": 1, "codes": ["yaml-tag"]}
    assert faults(fine) == []
    for key in ("executed", "opened", "leaked"):
        assert faults({**fine, key: ["x"]}) == [f"{key}: x"]
    assert faults({**fine, "refused": False, "status": 0}) and faults({**fine, "seconds": 1.5})
