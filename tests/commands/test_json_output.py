"""What is printed with `--json`, and without it where there is nothing to show."""

from __future__ import annotations

import json

import pytest

from parallelizer.commands.json_output import print_json, print_refusal
from parallelizer.diagnostics.diagnostic import Diagnostic

Captured = pytest.CaptureFixture[str]
WRONG = Diagnostic("unknown-style", "there is no style 'fdsp'")


def test_a_document_is_all_of_stdout_and_ends_its_line(capsys: Captured) -> None:
    print_json({"a": [1]})
    assert capsys.readouterr().out == '{\n "a": [\n  1\n ]\n}\n'


def test_a_refusal_is_a_document_or_words_on_stderr(capsys: Captured) -> None:
    print_refusal([WRONG], as_json=True)
    printed = capsys.readouterr()
    [found] = json.loads(printed.out)["diagnostics"]
    assert found["code"] == "unknown-style" and printed.err == ""
    print_refusal([WRONG], as_json=False)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error[unknown-style]: there is no style 'fdsp'")
