"""Where a forward changes in place what a module returned, which a plan does not allow, and the edit that would help."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.simulate.whole_numbers import IN_PLACE


def changed_in_place(found: Diagnostic) -> str | None:
    """The refusal in words, with the line and what to write instead; None where the step fails of something else."""
    if IN_PLACE not in found.message:
        return None
    at = found.related[0].span if found.related else None
    place = "" if at is None else f", at {at.file if len(at.file) < 40 else Path(at.file).name}:{at.line}"
    written = "" if at is None else _written(at)
    return f"what it returns is changed in place{place}{written}"


def _written(at: Span) -> str:
    """The line, and the same without the change in place."""
    line = linecache.getline(at.file, at.line).strip()
    try:
        (statement,) = ast.parse(line).body
    except (SyntaxError, ValueError):
        return ""
    if not isinstance(statement, ast.AugAssign):
        return f": `{ast.unparse(statement)}`"
    value = ast.BinOp(ast.Name(ast.unparse(statement.target)), statement.op, statement.value)
    return f": `{ast.unparse(statement)}`, which could be `{ast.unparse(statement.target)} = {ast.unparse(value)}`"
