"""The sources of functions and classes of this package, for a file that stands without it.

What the running program calls is what an exported file has: each copy takes along the functions, classes and constants of
this package that it names, and the imports that all of these need.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

PACKAGE = "parallelizer"


@dataclass
class Copied:
    """Sources by name, in the order in which they are to stand: functions and classes, and what is assigned, which stands
    above them. Imports: the names taken from each module, and modules by the name that they have in the file.
    """

    sources: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)


def copied(things: Iterable[Any]) -> Copied:
    """The copies of these functions and classes. Raises ValueError for a name that is neither theirs nor public."""
    made = Copied()
    for thing in things:
        _copy(thing.__name__, importlib.import_module(thing.__module__), made)
    return made


def _copy(name: str, module: ModuleType, made: Copied) -> None:
    if name in made.sources or name in made.constants:
        return
    source, tree = _definition(name, module)
    is_constant = not isinstance(tree, ast.FunctionDef | ast.ClassDef)
    if not is_constant:
        made.sources[name] = (
            ""  # its place: what it needs stands below it, as in a file that is read from the top
        )
    local = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    inside = _without(source, local)
    imports = {**_imports(ast.parse(inspect.getsource(module)).body), **_imports(local)}
    for used in sorted(_used(ast.parse(inside))):
        if used in imports:
            _take(used, *imports[used], made)
        elif used in vars(module) and used != name and used not in vars(builtins):
            _copy(used, module, made)
    (made.constants if is_constant else made.sources)[name] = inside


def _definition(name: str, module: ModuleType) -> tuple[str, ast.AST]:
    """The source of a function, a class, or an assignment at the top of a module."""
    text = inspect.getsource(module)
    for node in ast.parse(text).body:
        named = getattr(node, "name", None) == name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        assigned = any(isinstance(t, ast.Name) and t.id == name for t in targets)
        if named or assigned:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno]), node
    raise ValueError(f"{name} is not defined at the top of {module.__name__}")


def _without(source: str, imports: list[ast.Import | ast.ImportFrom]) -> str:
    """A source without the imports inside of it, which the file has at its top."""
    if not imports:
        return source
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in sorted(ast.walk(tree), key=lambda n: -getattr(n, "lineno", 0)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            del lines[node.lineno - 1 : node.end_lineno]
    # Blank lines stood around each group of imports: one of them stays.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _imports(nodes: Iterable[ast.AST]) -> dict[str, tuple[str, str | None]]:
    """Imported names, each with its module and the name there; None for a module itself. Those for type checkers too."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in nodes:
        if isinstance(node, ast.If):
            found.update(_imports(node.body))
        elif isinstance(node, ast.Import):
            found.update({a.asname or a.name: (a.name, None) for a in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            found.update({a.asname or a.name: (node.module or "", a.name) for a in node.names})
    return found


def _take(name: str, module: str, there: str | None, made: Copied) -> None:
    if there is None:
        made.modules[name] = module
    elif module.split(".")[0] != PACKAGE:
        made.names.setdefault(module, set()).add(there if there == name else f"{there} as {name}")
    elif there == name:
        home = getattr(getattr(importlib.import_module(module), name), "__module__", module)
        # A package may hand on what one of its modules defines.
        _copy(name, importlib.import_module(home if str(home).startswith(PACKAGE) else module), made)
    else:
        raise ValueError(f"{module}.{there} is called {name} where it is used: a copy could not be")


def _used(tree: ast.AST) -> set[str]:
    """Every name that a piece of code mentions, in annotations too."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
