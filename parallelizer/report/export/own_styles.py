"""Styles of the user's own in exported code: a class that can be imported, made anew from the arguments that
it was made with.

Those arguments are not recorded, so they are read from the object, and believed only if an object made from
them is the same.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.styles.statements import Statement


class Unwritable(Exception):
    """Why an object cannot be written as a call."""


def own_style(act: ParallelStyle, taken: Mapping[str, type | None]) -> Statement:
    """The call that makes `act`, by the bare name of its class; `taken` are names that mean something else,
    or that class. Raises Unwritable with the reason, a clause about the class.
    """
    kind = type(act)
    if taken.get(kind.__name__, kind) is not kind:
        raise Unwritable(f"the file has another {kind.__name__} already")
    if not importable(kind):
        raise Unwritable(f"{kind.__qualname__} cannot be imported from {kind.__module__}")
    given = _arguments(act)
    try:
        same = vars(kind(**given)) == vars(act)
    except Exception as error:  # whatever a user's constructor raises, or two tensors when compared
        raise Unwritable(f"{kind.__qualname__} cannot be made again: {type(error).__name__}") from None
    if not same:
        raise Unwritable(f"{kind.__qualname__} made again from its attributes is another")
    arguments = tuple(f"{name}={_text(value)}" for name, value in given.items())
    return Statement(kind.__name__, arguments, parallel_style=True)


def importable(kind: type) -> bool:
    """Whether another program finds the class by its module and its name."""
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        return False
    try:
        return getattr(importlib.import_module(kind.__module__), kind.__name__, None) is kind
    except ImportError:
        return False


def origins(acts: Iterable[ParallelStyle]) -> dict[str, list[str]]:
    """The classes' names by the modules that they are imported from."""
    found: dict[str, set[str]] = {}
    for act in acts:
        found.setdefault(type(act).__module__, set()).add(type(act).__name__)
    return {module: sorted(names) for module, names in sorted(found.items())}


def imports_this_package(module: str) -> bool:
    """Whether a module that was imported has anything of this package in it."""
    package = __name__.split(".")[0]
    values = vars(sys.modules[module]).values()
    names = (v.__name__ if inspect.ismodule(v) else getattr(v, "__module__", "") for v in values)
    return any(isinstance(n, str) and n.split(".")[0] == package for n in names)


def _arguments(act: ParallelStyle) -> Mapping[str, Any]:
    """What a constructor is called with, from attributes of the same names, or with one underscore before."""
    held, given = vars(act), {}
    for name, parameter in inspect.signature(type(act)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise Unwritable(f"{type(act).__qualname__} takes {name!r} by position alone")
        value = held.get(name, held.get(f"_{name}", parameter.default))
        if value is parameter.empty:
            raise Unwritable(f"{type(act).__qualname__} does not keep its argument {name!r}")
        if not (isinstance(value, type(parameter.default)) and value == parameter.default):
            given[name] = value
    return given


def _text(value: Any) -> str:
    """A value as an expression on builtins and torch's names."""
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if type(value) is Shard:
        return f"Shard({value.dim})"
    if type(value) is Replicate or (type(value) is Partial and value == Partial()):
        return f"{type(value).__name__}()"
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) in (list, tuple):
        inside = ", ".join(map(_text, value))
        return f"[{inside}]" if type(value) is list else f"({inside}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
    raise Unwritable(f"a {type(value).__name__} cannot be written out")
