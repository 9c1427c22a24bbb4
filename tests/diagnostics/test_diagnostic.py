"""Findings as data: their order, their JSON, and errors that can be sent to another process."""

from __future__ import annotations

import copy
import json
import pickle
import random

import pytest

from parallelizer.diagnostics.diagnostic import (
    Diagnostic,
    Findings,
    PlanError,
    Related,
    Span,
    counts,
    has_errors,
    in_order,
    one_line,
    quoted,
    shortened,
)

ERROR = Diagnostic(
    "a-code",
    "what is wrong",
    Span("f.yaml", 3, 5, 9),
    "what to do",
    related=(Related(Span("g", 1, 2, 3), "why"),),
)
WARNING = Diagnostic("b-code", "odd", Span("f.yaml", 2, 1, 2), severity="warning")
NOTE = Diagnostic("c-code", "by the way", severity="note")


def test_findings_come_in_order_of_position_and_each_once() -> None:
    findings = [
        NOTE,
        Diagnostic("x", "1", Span("a.yaml", 9, 1, 2)),
        Diagnostic("x", "2", Span("b.yaml", 2, 4, 5)),
        Diagnostic("x", "3", Span("b.yaml", 2, 10, 11)),
        Diagnostic("x", "4", Span("b.yaml", 10, 1, 2)),
        Diagnostic("y", "4", Span("b.yaml", 10, 1, 2)),
    ]
    shuffled = findings * 2
    random.Random(0).shuffle(shuffled)
    assert in_order(shuffled) == tuple(findings)
    assert PlanError(shuffled).diagnostics == tuple(findings)


def test_errors_come_last_and_warnings_before_them() -> None:
    late = Diagnostic("n", "a note", Span("z.yaml", 1, 1, 2), severity="note")
    assert in_order([ERROR, late, WARNING]) == (late, WARNING, ERROR)


def test_only_errors_forbid_the_launch() -> None:
    assert has_errors([NOTE, ERROR]) and not has_errors([NOTE, WARNING]) and not has_errors([])


def test_the_json_form_has_the_documented_keys() -> None:
    assert json.loads(json.dumps(ERROR.as_json())) == {
        "code": "a-code",
        "severity": "error",
        "message": "what is wrong",
        "help": "what to do",
        "span": {"file": "f.yaml", "line": 3, "column": 5, "end_column": 9},
        "related": [{"label": "why", "span": {"file": "g", "line": 1, "column": 2, "end_column": 3}}],
    }
    assert (
        NOTE.as_json()["span"] is None and NOTE.as_json()["help"] is None and NOTE.as_json()["related"] == []
    )


def test_one_line_holds_place_severity_code_and_help() -> None:
    assert one_line(ERROR) == "f.yaml:3:5: error[a-code]: what is wrong (what to do)"
    assert one_line(NOTE) == "note[c-code]: by the way"


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        ([], "no findings"),
        ([ERROR], "1 error"),
        ([ERROR, WARNING, ERROR, NOTE, NOTE], "2 errors, 1 warning, 2 notes"),
        ([WARNING], "1 warning"),
    ],
)
def test_findings_are_counted_by_severity(findings: list[Diagnostic], text: str) -> None:
    assert counts(findings) == text


def test_an_error_survives_copying_and_pickling() -> None:
    error = PlanError([WARNING, ERROR])
    for twin in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert twin.diagnostics == error.diagnostics == (WARNING, ERROR)
        assert str(twin) == str(error) == f"{one_line(WARNING)}\n\n{one_line(ERROR)}"


def test_findings_are_collected() -> None:
    findings = Findings()
    findings.error(
        "a-code", "what is wrong", Span("f.yaml", 3, 5, 9), "what to do", [Related(Span("g", 1, 2, 3), "why")]
    )
    assert findings.items == [ERROR]
    assert Findings().items == []  # of its own


def test_what_a_user_wrote_is_quoted_without_control_characters_and_not_at_length() -> None:
    assert quoted("a'b") == '"a\'b"'
    assert quoted("\x1b[31m") == "'\\x1b[31m'"
    assert len(quoted("x" * 10**6)) == 62 and quoted("x" * 10**6).endswith("...'")
    assert shortened("x" * 60) == "x" * 60 and len(shortened("x" * 61)) == 60
