"""The registry and the sources agree, and every example triggers its code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from parallelizer.codes import CODES, FAMILIES, Code
from parallelizer.diagnostics import Diagnostic
from tests.codes import used
from tests.codes.ran import run
from tests.codes.triggers import TRIGGERS

RUN = [code for code in CODES.values() if code.example.runs]
OTHER = [code.name for code in CODES.values() if not code.example.runs]


def test_every_code_in_the_sources_is_registered_and_every_registered_one_is_in_the_sources() -> None:
    uses = used.uses()
    where = {use.code: f"{use.file}:{use.line}" for use in uses}
    assert {code: where[code] for code in where if code not in CODES} == {}
    assert [name for name in CODES if name not in where] == []


def test_a_code_that_cannot_be_told_from_the_source_fails() -> None:
    [call] = ast.parse('Diagnostic("a" + "-b", "a message")').body
    assert isinstance(call, ast.Expr)
    with pytest.raises(ValueError, match="cannot be told"):
        list(used.in_tree(ast.Module([call], []), "file.py", {"Diagnostic": 0}))


@pytest.mark.parametrize(
    "code",
    [pytest.param(c, marks=pytest.mark.slow) if c.example.traced else c for c in RUN],
    ids=lambda code: code.name,
)
def test_every_example_triggers_its_code_and_no_other_error(code: Code) -> None:
    ran = run(code)
    own = [d for d in ran.diagnostics if d.code == code.name]
    assert own and all(d.severity == code.severity for d in own), describe(ran.diagnostics)
    assert all(d.span is not None for d in own), describe(ran.diagnostics)
    assert [d.code for d in ran.diagnostics if d.severity == "error" and d.code != code.name] == []
    assert all(d.help and d.message for d in own) and ran.points


@pytest.mark.parametrize("name", OTHER)
def test_what_no_file_triggers_is_triggered_in_another_way(name: str, tmp_path: Path) -> None:
    assert CODES[name].example.because
    assert [d.code for d in TRIGGERS[name](tmp_path)] == [name]


def test_only_what_no_file_triggers_has_another_way() -> None:
    assert sorted(TRIGGERS) == sorted(OTHER)


def test_families_are_in_alphabetical_order_and_share_no_code() -> None:
    names = [code.name for family in FAMILIES for code in family.codes]
    assert len(names) == len(set(names)) == len(CODES)
    for family in FAMILIES:
        own = [code.name for code in family.codes]
        assert own == sorted(own), family.name


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
def test_every_code_says_what_it_is_and_why(code: Code) -> None:
    assert 10 < len(code.summary) < 80 and not code.summary.endswith(".")
    assert not code.summary[0].isupper() or code.summary.startswith(("Hydra", "YAML"))
    assert 120 < len(code.paragraph) < 700 and code.paragraph.endswith(".")


def test_the_registry_needs_no_torch() -> None:
    text = "import sys, parallelizer.codes; print(any(m in sys.modules for m in ('torch', 'hydra')))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def describe(diagnostics: tuple[Diagnostic, ...]) -> list[str]:
    return [f"{d.code} {d.severity} {d.span}: {d.message}" for d in diagnostics]
