"""Objects by dotted path, as configurations name them, and what is wrong with a path that names none."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from parallelizer.diagnostics.diagnostic import quoted
from parallelizer.diagnostics.nearest import nearest


def function_at(path: str) -> Callable[..., Any]:
    """What a path such as `my_package.losses.mine` names. Its module is imported.

    Raises ValueError, with a message about the path, if it does not exist or cannot be called;
    and what an import raises that fails for another reason than that the module is not there.
    """
    found = object_at(path)
    if not callable(found):
        raise ValueError(f"it names a {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def object_at(path: str) -> Any:
    """As `function_at`, for anything."""
    names = path.split(".")
    if not all(name.isidentifier() for name in names):
        raise ValueError(f"{quoted(path)} is not a dotted path")
    found: Any = None
    module = ""
    for at, name in enumerate(names):
        below = f"{module}.{name}" if module else name
        # A package that is imported already may have modules that are not.
        if at and hasattr(found, name) and not isinstance(getattr(found, name), ModuleType):
            return _attribute(found, names[at:], module)
        try:
            found = importlib.import_module(below)
        except ModuleNotFoundError as error:
            if error.name not in (below, module):
                raise  # the module is there, and lacks one of its own
            if not at:
                raise ValueError(f"there is no module {quoted(name)}") from None
            return _attribute(found, names[at:], module)
        module = below
    return found


def _attribute(found: Any, names: list[str], where: str) -> Any:
    for name in names:
        if not hasattr(found, name):
            near = nearest(name, [n for n in dir(found) if not n.startswith("_")], 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where} has no {quoted(name)}{meant}")
        found, where = getattr(found, name), f"{where}.{name}"
    return found
