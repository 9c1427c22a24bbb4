"""`explain`: what it prints for a code, for none and for a word that is neither, and its exit status.

Paths are tested in tests/report/text/test_explanation.py.
"""

from __future__ import annotations

import json

import pytest

from parallelizer.commands.main import main
from parallelizer.diagnostics.codes.all_codes import CODES, FAMILIES

Captured = pytest.CaptureFixture[str]


def test_every_code_is_listed_in_one_line_under_its_family(capsys: Captured) -> None:
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    for family in FAMILIES:
        assert not family.codes or f"\n{family.name}: " in f"\n{out}"
    for code in CODES.values():
        assert f"  {code.name} " in out


def test_a_word_that_is_nothing(capsys: Captured) -> None:
    assert main(["explain", "unmached-glob"]) == 1
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and "error[unknown-code]" in printed.err
        and "did you mean unmatched-glob?" in printed.err
    )
    assert main(["explain", "--json", "unmached-glob"]) == 1
    [found] = json.loads(capsys.readouterr().out)["diagnostics"]
    assert found["code"] == "unknown-code"


def test_codes_in_json(capsys: Captured) -> None:
    assert main(["explain", "--json", "unknown-axis"]) == 0
    [code] = json.loads(capsys.readouterr().out)["codes"]
    assert (code["code"], code["family"], code["severity"]) == ("unknown-axis", "language", "error")
    assert code["example"]["files"]["plan.yaml"] and "validate" in code["example"]["command"]
    assert code["example"]["output"].startswith("error[unknown-axis]: ") and code["fix"] and code["why"]
    assert main(["explain", "--json"]) == 0
    assert {c["code"] for c in json.loads(capsys.readouterr().out)["codes"]} == set(CODES)
