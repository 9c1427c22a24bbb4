"""Integers that a forward reads: attributes of the module, or of an object that it holds.

A dotted name leads through such objects, `config.num_attention_heads`, and into the sizes of einops' layers,
`_axes_lengths.h`. The whole model often shares them, so a number in one is never changed in place: the module gets a copy
of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn


def read(module: nn.Module, name: str) -> int | None:
    """The whole number of that name; None where there is none."""
    value: Any = module
    for part in name.split("."):
        value = _held(value, part)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def write(module: nn.Module, name: str, value: int) -> None:
    """Set the number of that name; the objects on the way to it are replaced by shallow copies.

    Raises AttributeError where something on the way, or the number itself, cannot be set.
    """
    leaf, *path = name.split(".")
    _set(module, leaf, _changed(getattr(module, leaf), path, value) if path else value)


def _changed(holder: Any, path: list[str], value: int) -> Any:
    """A copy of what is held, with another number at the end of the path."""
    leaf, *rest = path
    inner = _changed(_held(holder, leaf), rest, value) if rest else value
    if pairs(holder):
        return tuple((name, inner if name == leaf else number) for name, number in holder)
    own = copy.copy(holder)
    _set(own, leaf, inner)
    return own


def pairs(value: Any) -> bool:
    """Whether it is a tuple of names and numbers, as the layers of einops hold their sizes."""
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in value)
    )


def _held(holder: Any, name: str) -> Any:
    if pairs(holder):
        return dict(holder).get(name)
    try:
        return getattr(holder, name, None)
    except (
        Exception
    ):  # an object of the user's may refuse to be read, as a configuration whose layers differ does
        return None


def divide(module: nn.Module, name: str, ranks: int) -> None:
    """Divide a number that forward reads by the ranks that share what it counts."""
    write(module, name, (read(module, name) or 0) // ranks)


def is_writable(module: nn.Module, name: str) -> bool:
    """Whether `write` can set a number that `read` finds. Changes nothing."""
    *path, leaf = name.split(".")
    holder: Any = module
    for part in path:
        inner = _held(holder, part)
        if isinstance(inner, nn.Module) or _computed(holder, part):
            return False  # of another module: a rule for it would not know
        holder = inner
    if pairs(holder):
        return True
    if not path:
        return not _computed(module, leaf)
    try:
        trial = copy.copy(holder)
        _set(trial, leaf, getattr(holder, leaf))
    except Exception:  # whatever an object of the user's says to being copied or changed
        return False
    return trial is not holder


def numbers(module: nn.Module) -> list[str]:
    """The names of the whole numbers of a module, then those of the objects that it holds."""
    own = [n for n in vars(module) if n[0] != "_" and read(module, n) is not None]
    held = [
        f"{name}.{inner}"
        for name, value in vars(module).items()
        if name[0] != "_" and hasattr(value, "__dict__") and not isinstance(value, nn.Module)
        for inner in vars(value)
        if inner[0] != "_" and read(module, f"{name}.{inner}") is not None
    ]
    return own + held


def nearest_number(modules: Iterable[nn.Module], name: str) -> int | None:
    """The number of that name of the first module that has one."""
    return next((value for m in modules if (value := read(m, name)) is not None), None)


def _computed(holder: Any, name: str) -> bool:
    """Whether a class computes the attribute, and says nothing of how it is set."""
    declared = getattr(type(holder), name, None)
    return isinstance(declared, property) and declared.fset is None


def _set(holder: Any, name: str, value: Any) -> None:
    try:
        setattr(holder, name, value)
    except AttributeError:  # a frozen dataclass: no other code relies on this copy being frozen
        object.__setattr__(holder, name, value)
