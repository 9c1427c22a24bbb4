"""The current part of a training step: set by `train_step`, read by recorders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("forward", "loss", "backward", "clip", "optimizer")

_current = ""
_begun = 0
_ended: list[Callable[[str], None]] = []
# A plain global and not a context variable: backward may run in a thread of its own.


def current() -> str:
    """The phase now running, or an empty text outside a step."""
    return _current


def begun() -> int:
    """How many phases have begun in this process: tells one backward from the next of accumulated parts."""
    return _begun


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark what runs inside as one phase of the step."""
    global _current, _begun
    before, _current = _current, name
    _begun += 1
    try:
        yield
    finally:
        _current = before
        for function in _ended:
            function(name)


@contextmanager
def told(function: Callable[[str], None]) -> Iterator[None]:
    """Inside, call `function` with the name of each phase at its end."""
    _ended.append(function)
    try:
        yield
    finally:
        _ended.remove(function)
