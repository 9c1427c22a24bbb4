"""The digest of a value: equal for equal plans and settings, wherever their files and lines are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from parallelizer.diagnostics.diagnostic import Span


def digest(value: Any) -> str:
    """The SHA-256 of a value, in hexadecimal digits: of numbers, texts, dataclasses and what holds them; of anything else, of its
    `repr`.
    """
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """A value as JSON has it. Places in files are left out: a rule on another line is the same rule."""
    if isinstance(value, Span):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = [f.name for f in dataclasses.fields(value) if f.compare]
        return [type(value).__name__, {name: _plain(getattr(value, name)) for name in compared}]
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
