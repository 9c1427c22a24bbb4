"""Which part of a training step is running: told by `train_step`, read by whoever records it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("forward", "loss", "backward", "clip", "optimizer")

_current = ""
# A plain global and not a context variable: backward may run in a thread of its own.


def current() -> str:
    """The phase now running, or an empty text outside a step."""
    return _current


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark what runs inside as one phase of the step."""
    global _current
    before, _current = _current, name
    try:
        yield
    finally:
        _current = before
