"""The attributes that a method reads from its object, found in its source: `heads`, or `config.heads` of an
attribute.
"""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator, Mapping


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


def flowing_into(code: types.CodeType, line: int) -> list[str]:
    """As `named_in` of the statement at a line, and of the assignments of the function that its variables come from: what an
    `assert` or another branch reads has nothing to do with it.
    """
    around = [n for n in ast.walk(_tree(code)) if isinstance(n, ast.FunctionDef) and n.name == code.co_name]
    function = max((f for f in around if f.lineno <= line), key=lambda f: f.lineno, default=None)
    statements = [n for n in ast.walk(function or ast.Module([], [])) if isinstance(n, ast.stmt)]
    at = [n for n in statements if n.lineno <= line <= (n.end_lineno or n.lineno) and n is not function]
    if function is None or not at:
        return []
    flowing: list[ast.AST] = [max(at, key=lambda n: n.lineno)]
    wanted, known = _variables(flowing[0]), _held(function)
    assigns = [n for n in statements if isinstance(n, ast.Assign) and n.lineno < line]
    for assign in reversed(assigns):
        if any(_variables(target) & wanted for target in assign.targets):
            flowing.append(assign.value)
            wanted |= _variables(assign.value)
    return list(dict.fromkeys(name for node in flowing for name in _dotted(node, known)))


def _variables(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _tree(code: types.CodeType) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _dotted(node: ast.AST, known: Mapping[str, str] | None = None) -> list[str]:
    """The attributes of `self` in a piece of code, and those of a variable that is one of them: of those `known`, or
    assigned in it.
    """
    known = known or _held(node)
    chains = (_chain(n, known) for n in _computing(node) if isinstance(n, ast.Attribute))
    return list(dict.fromkeys(chain for chain in chains if chain))


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """A piece of code without what it only asserts or asks for: `assert length <= self.block_size`."""
    yield node
    asked = (
        node if isinstance(node, ast.Assert) else node.test if isinstance(node, ast.If | ast.While) else None
    )
    for below in ast.iter_child_nodes(node):
        if asked is not node and below is not asked:
            yield from _computing(below)


def _held(node: ast.AST) -> dict[str, str]:
    """The variables of a piece of code that are attributes of `self`, by the attribute's dotted name."""
    known = {"self": ""}
    for assign in (n for n in ast.walk(node) if isinstance(n, ast.Assign)):
        for target, value in _pairs(assign.targets[0], assign.value):
            chain = _chain(value, known)
            if isinstance(target, ast.Name) and chain:
                known[target.id] = chain
    return known


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
