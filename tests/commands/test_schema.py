"""`schema`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from parallelizer.commands.main import main
from parallelizer.language.schema.schema import plan_schema, preset_schema
from parallelizer.language.styles import STYLES


def test_the_command_prints_both_and_they_are_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, made in (([], plan_schema(STYLES)), (["--preset"], preset_schema(STYLES))):
        assert main(["schema", *arguments]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed == made
        jsonschema.Draft7Validator.check_schema(printed)


def test_a_style_of_ones_own_is_in_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "styles_of_schema_test.py").write_text(
        "from parallelizer.language.styles import StyleDeclaration, OptionKind, declare\n"
        "declare(StyleDeclaration('scaled', 'io', 'tp', 'scale outputs', {'by': OptionKind('int', 'the factor')}))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(STYLES)
    try:
        assert main(["schema", "imports=[styles_of_schema_test]"]) == 0
    finally:
        STYLES.clear()
        STYLES.update(before)
    own = jsonschema.Draft7Validator(json.loads(capsys.readouterr().out))
    assert own.is_valid({"rules": {"a": {"style": "scaled", "by": 3}}})
    assert not own.is_valid({"rules": {"a": {"style": "scaled", "by": "x"}}})
    shipped = jsonschema.Draft7Validator(plan_schema(STYLES))
    assert not shipped.is_valid({"rules": {"a": {"style": "scaled", "by": 3}}})


def test_imports_that_fail_are_a_diagnostic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "imports=[nowhere_to_be_found]"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "import-failed" in printed.err
