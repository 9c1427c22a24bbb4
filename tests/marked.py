"""Findings that stand as comments beside the wrong lines of a file; `tests/plans/README.md` says how."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from parallelizer.diagnostics import Diagnostic

_MARK = re.compile(r"#( *)([\^<]+) ([a-z-]+):(?: (.*?))?(?: \| (.*))?")


@dataclass(frozen=True)
class Mark:
    """What is to be found: where, under which code, and parts of the message and of the help."""

    line: int
    column: int
    end_column: int
    code: str
    message: str
    help: str


def marks(text: str) -> list[Mark]:
    """The findings that the comments of a text tell of."""
    found = []
    wrong = 0
    for number, line in enumerate(text.split("\n"), start=1):
        match = _MARK.fullmatch(line.strip())
        if match is None:
            wrong = number
            continue
        indent = len(line) - len(line.lstrip())
        column = indent + 2 + len(match[1]) - (match[2][0] == "<")
        found.append(Mark(wrong, column, column + len(match[2]), match[3], match[4] or "", match[5] or ""))
    return found


def check(text: str, findings: Iterable[Diagnostic]) -> None:
    """Fail unless the findings are those that the comments tell of, and no others."""
    expected = marks(text)
    places = {(m.line, m.column, m.end_column, m.code) for m in expected}
    actual = {
        (d.span.line, d.span.column, d.span.end_column, d.code): d for d in findings if d.span is not None
    }
    surprising = [
        str(d.span) + f"-{d.span.end_column} {d.code}: {d.message}"
        for p, d in actual.items()
        if p not in places and d.span
    ]
    assert not surprising, "found and not expected: " + "; ".join(surprising)
    missing = [
        mark for mark in expected if (mark.line, mark.column, mark.end_column, mark.code) not in actual
    ]
    assert not missing, f"expected and not found: {missing}"
    assert all(d.span is not None for d in findings)
    for mark in expected:
        found = actual[mark.line, mark.column, mark.end_column, mark.code]
        assert mark.message in found.message, found
        assert mark.help in (found.help or ""), found
        assert found.help, found
