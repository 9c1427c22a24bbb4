"""Findings of one kind about one rule are one finding: equal things put together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """The items in groups of one key each, in order of first appearance."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
