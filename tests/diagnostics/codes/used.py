"""Which codes the sources can report, read from their syntax trees.

A code is what is passed to a parameter called `code`: of `Diagnostic`, of the functions that make one, and of
the exceptions that become one. An argument that is neither a literal nor handed on from such a parameter is an
error: then nobody could tell which codes there are.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("parallelizer", "recipes")
_CODE = re.compile(r"[a-z]+(-[a-z]+)*")


@dataclass(frozen=True)
class Use:
    """One place that passes a code."""

    code: str
    file: str
    line: int


@functools.cache
def uses(root: Path = ROOT) -> list[Use]:
    """Every code that is passed somewhere. Raises ValueError for an argument that cannot be followed."""
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    texts = {path: path.read_text() for path in files}
    takers = _takers(ast.parse(text) for text in texts.values() if "code" in text)
    named = re.compile(rf"\b({'|'.join(takers)})\(")
    return [
        use
        for path, text in texts.items()
        if named.search(text)
        for use in in_tree(ast.parse(text), str(path.relative_to(root)), takers)
    ]


def _takers(trees: Iterable[ast.Module]) -> dict[str, int]:
    """By the name of each function that takes a code and a message, the code's place among the arguments."""
    found = {"Diagnostic": 0}
    for tree in trees:
        for node in ast.walk(tree):
            for part in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(part, ast.FunctionDef):
                    names = [a.arg for a in part.args.args if a.arg != "self"]
                    if "code" in names and {"message", "what"} & set(names):
                        name = (
                            node.name
                            if isinstance(node, ast.ClassDef) and part.name == "__init__"
                            else part.name
                        )
                        found[name] = names.index("code")
    return found


def in_tree(tree: ast.Module, file: str, takers: dict[str, int]) -> Iterator[Use]:
    """The codes that one file passes to the functions named in `takers`."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in takers:
            index = takers[name]
            given = [k.value for k in node.keywords if k.arg == "code"] or node.args[index : index + 1]
            for argument in given:
                yield from _codes(argument, file, constants)


def _codes(node: ast.expr, file: str, constants: dict[str, ast.expr]) -> Iterator[Use]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CODE.fullmatch(node.value):
        yield Use(node.value, file, node.lineno)
    elif isinstance(node, ast.IfExp):
        yield from _codes(node.body, file, constants)
        yield from _codes(node.orelse, file, constants)
    elif isinstance(node, ast.Name) and node.id in constants:
        yield from _codes(constants[node.id], file, constants)
    elif not isinstance(node, ast.Name | ast.Attribute | ast.JoinedStr | ast.Constant):
        raise ValueError(f"{file}:{node.lineno}: it cannot be told which code this is")
