"""Findings about what a user wrote: data first, text later.

A `Diagnostic` has a stable code, names the problem (never the fix), points at the narrowest wrong
span, and carries the fix in `help`. Rendering is separate (`render`, `as_json`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

LINE_BREAK = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
"""What PyYAML takes for the end of a line."""


Severity = Literal["error", "warning", "note"]

_SEVERITIES = "note", "warning", "error"
"""In the order in which findings are shown."""


HERE = "here"
"""The label of the line of a model that a finding is about."""


@dataclass(frozen=True, order=True)
class Span:
    """Where something was written: 1-based line and columns; `end_column` is one past the last character.

    `file` is a path as the user would type it, or a source in angle brackets such as `<override rules=...>`.
    """

    file: str
    line: int = 1
    column: int = 1
    end_column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Related:
    """A second place that has to do with the problem, with a short label."""

    span: Span
    label: str


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `code` is stable across releases; `message` names the problem; `help` is the fix."""

    code: str
    message: str
    span: Span | None = None
    help: str | None = None
    severity: Severity = "error"
    related: tuple[Related, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The finding in the documented JSON form; `span` is null for a finding without a place in a file."""
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "help": self.help,
            "span": _span_json(self.span),
            "related": [{"label": r.label, "span": _span_json(r.span)} for r in self.related],
        }


def _span_json(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {"file": span.file, "line": span.line, "column": span.column, "end_column": span.end_column}


@dataclass
class Findings:
    """Collects diagnostics while reading goes on, so that all of a file's come at once."""

    items: list[Diagnostic] = field(default_factory=list)

    def error(
        self,
        code: str,
        message: str,
        span: Span | None,
        help: str | None = None,
        related: Sequence[Related] = (),
    ) -> None:
        """Add an error."""
        self.items.append(Diagnostic(code, message, span, help, related=tuple(related)))


class PlanError(Exception):
    """The errors in what a user wrote, with every other finding, in the order of `in_order`."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = in_order(diagnostics)
        super().__init__(self.diagnostics)  # what it is made from, so that it can be sent to another process

    def __str__(self) -> str:
        return "\n\n".join(one_line(d) for d in self.diagnostics)


def in_order(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Notes, then warnings, then errors: in a terminal the errors are next to the summary and the prompt. Within each, sorted
    by file and position, those without a place first. Duplicates are dropped.
    """
    unique = dict.fromkeys(diagnostics)
    return tuple(
        sorted(
            unique,
            key=lambda d: (_SEVERITIES.index(d.severity), d.span or Span("", 0, 0, 0), d.code, d.message),
        )
    )


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Whether any finding forbids the launch."""
    return any(d.severity == "error" for d in diagnostics)


def one_line(diagnostic: Diagnostic) -> str:
    """`file:line:column: error[code]: message (help)`, for logs and exceptions."""
    where = f"{diagnostic.span}: " if diagnostic.span else ""
    tail = f" ({diagnostic.help})" if diagnostic.help else ""
    return f"{where}{diagnostic.severity}[{diagnostic.code}]: {diagnostic.message}{tail}"


def shortened(text: str, limit: int = 60) -> str:
    """The text, or its beginning if it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(text: str) -> str:
    """A text as messages show it: in quotes, without control characters, and not long."""
    return repr(shortened(text))


def counts(diagnostics: Sequence[Diagnostic]) -> str:
    """`2 errors, 1 warning`: what a summary line says."""
    parts = []
    for severity in ("error", "warning", "note"):
        n = sum(d.severity == severity for d in diagnostics)
        if n:
            parts.append(f"{n} {severity}{'s' if n > 1 else ''}")
    return ", ".join(parts) or "no findings"
