"""One meaning for each class name in the whole package."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "parallelizer"

APART = ("models", "recipes", "commands/new/starter")
"""Folders of models and trainings that are somebody's own, and name their classes as they like."""


def test_no_two_files_define_a_class_of_one_name() -> None:
    """Classes inside functions are seen by nobody else."""
    files: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(tuple(f"{folder}/" for folder in APART)):
            continue
        for name in _classes(ast.parse(path.read_text())):
            if relative not in files.setdefault(name, []):
                files[name].append(relative)
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(where)}" for name, where in twice.items())


def _classes(node: ast.AST) -> list[str]:
    """The classes of a file, those in other classes and under conditions too."""
    found: list[str] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.ClassDef):
            found.append(child.name)
        found += _classes(child)
    return found
