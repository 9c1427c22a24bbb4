"""The attributes that a method reads from its object, found in its source: `heads`, or `config.heads` of an
attribute.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Mapping


def named_in(code: types.CodeType, line: int | None = None) -> list[str]:
    """What a method's code, or its statement at a line, says of `self`, as dotted names in order; nothing where its
    source cannot be read.
    """
    tree = ast.walk(_tree(code))
    if line is None:
        functions = (n for n in tree if isinstance(n, ast.FunctionDef) and n.name == code.co_name)
        inside: list[ast.stmt] = [f for f in functions if f.lineno >= code.co_firstlineno]
        return _dotted(min(inside, key=lambda f: f.lineno)) if inside else []
    around = [n for n in tree if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    return _dotted(max(around, key=lambda n: n.lineno)) if around else []


def _tree(code: types.CodeType) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _dotted(node: ast.AST) -> list[str]:
    """The attributes of `self` in a piece of code, and those of a variable that is one of them."""
    known = {"self": ""}
    for assign in (n for n in ast.walk(node) if isinstance(n, ast.Assign)):
        for target, value in _pairs(assign.targets[0], assign.value):
            chain = _chain(value, known)
            if isinstance(target, ast.Name) and chain:
                known[target.id] = chain
    chains = (_chain(n, known) for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return list(dict.fromkeys(chain for chain in chains if chain))


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _chain(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """`a.b` for `self.a.b`, or for `x.b` where `x` is `self.a`."""
    if isinstance(node, ast.Attribute):
        before = _chain(node.value, known)
        return None if before is None else f"{before}.{node.attr}".lstrip(".")
    return known.get(node.id) if isinstance(node, ast.Name) else None
