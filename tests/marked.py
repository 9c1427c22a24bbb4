"""Findings that stand as comments beside the wrong lines of a file; `tests/plans/README.md` says how."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Diagnostic, Span

_MARK = re.compile(r"#( *)([\^<]+) ([a-z-]+):(?: (.*?))?(?: \| (.*))?")
_ELSEWHERE = re.compile(r"#@ (\S+):(\d+):(\d+) ([a-z-]+):(?: (.*?))?(?: \| (.*))?")
COMMAND = "# $ "
"""Begins the first line of a file that is validated with overrides, on a model."""


@dataclass(frozen=True)
class Mark:
    """What is to be found: where, under which code, and parts of the message and of the help.

    `file` is empty for the file itself; `end_column` is 0 where it is not looked at.
    """

    line: int
    column: int
    end_column: int
    code: str
    message: str
    help: str
    file: str = ""


def marks(text: str) -> list[Mark]:
    """The findings that the comments of a text tell of."""
    found = []
    wrong = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if other := _ELSEWHERE.fullmatch(line.strip()):
            place = int(other[2]), int(other[3]), 0
            found.append(Mark(*place, other[4], other[5] or "", other[6] or "", other[1]))
            continue
        match = _MARK.fullmatch(line.strip())
        if match is None:
            wrong = number
            continue
        indent = len(line) - len(line.lstrip())
        column = indent + 2 + len(match[1]) - (match[2][0] == "<")
        found.append(Mark(wrong, column, column + len(match[2]), match[3], match[4] or "", match[5] or ""))
    return found


def overrides(text: str) -> list[str] | None:
    """The overrides in the first line; None for a file without such a line."""
    first = text.split("\n")[0]
    return shlex.split(first.removeprefix(COMMAND)) if first.startswith(COMMAND) else None


def check(text: str, findings: Iterable[Diagnostic], file: str = "") -> None:
    """Fail unless the findings are those that the comments tell of, and no others.

    Places in overrides are those in the first line. Notes count where they are told of. `file` is the name that
    the text has in findings; without one every finding is taken to be in it.
    """
    expected = marks(text)
    findings = [d for d in findings if d.severity != "note" or d.code in {m.code for m in expected}]
    actual: dict[Place, list[Diagnostic]] = {}
    for found in findings:
        assert found.span is not None and found.help, found
        actual.setdefault(_place(found, text, file, expected), []).append(found)
    places = {(m.file, m.line, m.column, m.end_column, m.code) for m in expected}
    surprising = [
        f"{d.span}-{d.span.end_column} {d.code}: {d.message}"
        for place, several in actual.items()
        for d in several
        if place not in places and d.span
    ]
    assert not surprising, "found and not expected: " + "; ".join(surprising)
    missing = [m for m in expected if (m.file, m.line, m.column, m.end_column, m.code) not in actual]
    assert not missing, f"expected and not found: {missing}"
    for mark in expected:
        here = actual[mark.file, mark.line, mark.column, mark.end_column, mark.code]
        assert any(mark.message in d.message and mark.help in (d.help or "") for d in here), (mark, here)
    assert sum(map(len, actual.values())) == len(expected), "several findings at one place, and fewer marks"


Place = tuple[str, int, int, int, str]


def _place(found: Diagnostic, text: str, file: str, expected: Iterable[Mark]) -> Place:
    span = found.span or Span("")
    if span.file.startswith("<override "):
        word = span.file.removeprefix("<override ").removesuffix(">")
        start = text.split("\n")[0].find(word)
        return "", 1, start + span.column, start + span.end_column, found.code
    if file and span.file != file:
        shown = next((m.file for m in expected if m.file and span.file.endswith(m.file)), span.file)
        return shown, span.line, span.column, 0, found.code
    return "", span.line, span.column, span.end_column, found.code
