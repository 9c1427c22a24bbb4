"""Every example is run once, whoever asks for what was found in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallelizer.codes import Code
from parallelizer.codes.example import found
from parallelizer.codes.page import WIDTH
from parallelizer.diagnostics import Diagnostic
from parallelizer.show.codes import own_lines


@dataclass(frozen=True)
class Ran:
    """What was found in an example, as data and as the page shows it, and whether what is marked was there."""

    diagnostics: tuple[Diagnostic, ...]
    lines: tuple[str, ...]
    points: bool


_runs: dict[str, Ran] = {}


def run(code: Code) -> Ran:
    """What was found in a code's example, which is run when it is asked for first."""
    if code.name not in _runs:
        with found(code.example) as diagnostics:
            own = [d for d in diagnostics if d.code == code.name]
            lines = tuple(own_lines(code, diagnostics, WIDTH))
            _runs[code.name] = Ran(diagnostics, lines, all(map(points_at_something, own)))
    return _runs[code.name]


def points_at_something(found: Diagnostic) -> bool:
    """Whether the characters that a finding marks are there, in its file or in its override."""
    span = found.span
    if span is None:
        return False
    if span.file.startswith("<override "):
        lines = [span.file.removeprefix("<override ").removesuffix(">")]
    else:
        lines = Path(span.file).read_text().split("\n")
    # A file as a whole has no columns.
    return len(lines[span.line - 1]) + 1 >= span.column and span.end_column >= span.column
