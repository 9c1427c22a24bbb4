"""Every code has a section, and every section is true: the sources report its code, and its example prints what it says.

`UPDATE_SNAPSHOTS=1 python -m pytest -m "" tests/diagnostics/codes` writes what the examples print today into the
sections; the difference is then read in the commit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from parallelizer.diagnostics.codes.all_codes import CODES, FAMILIES, FOLDERS
from parallelizer.diagnostics.codes.section import Code
from parallelizer.diagnostics.diagnostic import Diagnostic
from tests import golden
from tests.diagnostics.codes import used
from tests.diagnostics.codes.run_example import run
from tests.diagnostics.codes.triggers import TRIGGERS

ROOT = Path(__file__).resolve().parents[3]
RUN = [code for code in CODES.values() if code.example.runs]
OTHER = [code.name for code in CODES.values() if not code.example.runs]


def test_every_code_in_the_sources_has_a_section_and_every_section_s_code_is_in_the_sources() -> None:
    uses = used.uses()
    where = {use.code: f"{use.file}:{use.line}" for use in uses}
    assert {code: where[code] for code in where if code not in CODES} == {}
    assert [name for name in CODES if name not in where] == []


def test_a_code_that_cannot_be_told_from_the_source_fails() -> None:
    [call] = ast.parse('Diagnostic("a" + "-b", "a message")').body
    assert isinstance(call, ast.Expr)
    with pytest.raises(ValueError, match="cannot be told"):
        list(used.in_tree(ast.Module([call], []), "file.py", {"Diagnostic": 0}))


def test_a_text_stands_beside_the_check_that_reports_its_code() -> None:
    reported: dict[str, set[str]] = {}
    for use in used.uses():
        reported.setdefault(use.file, set()).add(use.code)
    beside = [code for code in CODES.values() if not code.file.startswith("parallelizer/diagnostics/codes/")]
    checks = {code.file: Path(code.file).with_suffix(".py").as_posix() for code in beside}
    apart = {file: name for file, name in checks.items() if not (ROOT / name).is_file()}
    assert {code.name: code.file for code in beside if code.file not in apart} == {
        code.name: code.file for code in beside if code.name in reported.get(checks[code.file], ())
    }
    assert {file for file in apart if not file.startswith("parallelizer/simulate/checks/")} == set()


@pytest.mark.parametrize(
    "code",
    RUN,
    ids=lambda code: code.name,
)
def test_every_example_triggers_its_code_and_no_other_error(code: Code) -> None:
    ran = run(code)
    own = [d for d in ran.diagnostics if d.code == code.name]
    assert own and all(d.severity == code.severity for d in own), describe(ran.diagnostics)
    assert all(d.span is not None for d in own), describe(ran.diagnostics)
    assert [d.code for d in ran.diagnostics if d.severity == "error" and d.code != code.name] == []
    assert all(d.help and d.message for d in own) and ran.points
    file, command = ROOT / code.file, f"$ {code.example.command}\n"
    now = code.text.replace(f"{command}{code.example.output}\n```", f"{command}{ran.output}\n```")
    golden.same(file.read_text().replace(code.text, now), file)


@pytest.mark.parametrize("name", OTHER)
def test_what_no_file_triggers_is_triggered_in_another_way(name: str, tmp_path: Path) -> None:
    assert [d.code for d in TRIGGERS[name](tmp_path)] == [name]


def test_only_what_no_file_triggers_has_another_way() -> None:
    assert sorted(TRIGGERS) == sorted(OTHER)


def test_families_are_in_alphabetical_order_and_share_no_code() -> None:
    names = [code.name for family in FAMILIES for code in family.codes]
    assert len(names) == len(set(names)) == len(CODES) and names == list(CODES)
    for family in FAMILIES:
        own = [code.name for code in family.codes]
        assert own and own == sorted(own), family.name


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
def test_every_code_says_what_it_is_why_and_what_to_do(code: Code) -> None:
    assert 10 < len(code.summary) < 80 and not code.summary.endswith(".")
    assert not code.summary[0].isupper() or code.summary.startswith(("Hydra", "YAML"))
    assert 120 < len(" ".join(code.why)) < 700 and all(text.endswith(".") for text in code.why)
    assert 10 < len(code.fix) < 400 and code.fix.endswith((".", "`"))


def test_nothing_in_a_text_is_of_this_machine() -> None:
    assert [code.name for code in CODES.values() if str(ROOT) in code.text or "/tmp/" in code.text] == []


def test_every_folder_of_texts_is_in_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for folder in FOLDERS:
        assert "*.md" in data.get(f"parallelizer.{folder.replace('/', '.')}", []), folder


def test_the_codes_need_no_torch() -> None:
    text = "import sys, parallelizer.commands.explain.codes; print(*{'torch', 'hydra', 'omegaconf', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def describe(diagnostics: tuple[Diagnostic, ...]) -> list[str]:
    return [f"{d.code} {d.severity} {d.span}: {d.message}" for d in diagnostics]
