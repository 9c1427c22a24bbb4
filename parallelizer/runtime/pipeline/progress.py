"""What a rank of a pipeline is doing: told by the executor and its channels, noted by a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_listeners: list[Callable[[Any], None]] = []


def tell(mark: Any) -> None:
    """Say that something begins: (number of the pass, action), with None for the action behind the last."""
    for listener in _listeners:
        listener(mark)


@contextmanager
def marked(what: str, message: Any) -> Iterator[None]:
    """Around a part of an action that depends on the channel's other messages: `receive`, `post`, `send` or
    `finish` a message.
    """
    tell((what, message))
    try:
        yield
    finally:
        tell((f"end {what}", message))


@contextmanager
def listening(listener: Callable[[Any], None]) -> Iterator[None]:
    """Inside, call `listener` with each mark."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
