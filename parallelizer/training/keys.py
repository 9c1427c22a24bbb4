"""Tables of configuration keys: dataclasses whose fields give the key, its allowed values and its purpose.

One table defines the values of a run, the check of a configuration, the comments in `configs/` and the page
docs/settings.md. Tests compare the last two with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from parallelizer.configuration.reading import Reading, is_whole


@dataclass(frozen=True)
class Kind:
    """What a key takes: in words that follow "it is", and how it is read.

    `read` reports a value of no use in the Reading; what it returns then is not used. It is None for a key that
    something else reads.
    """

    words: str
    read: Callable[[Reading, Key], Any] | None = None


@dataclass(frozen=True)
class Key:
    """A key of the configuration: its dotted name, its shipped default, what it takes, and what it is for."""

    name: str
    default: Any
    takes: Kind
    words: str

    @property
    def section(self) -> str:
        """What stands before the last dot; nothing for a key of the root."""
        return self.name.rpartition(".")[0]


def key(section: str, default: Any, takes: Kind, words: str) -> Any:
    """A field of a table, which has its key's last name; `section` is `train`, say, or nothing for a key of the root."""
    return field(default=default, metadata={"section": section, "takes": takes, "words": words})


def keys_of(table: type) -> tuple[Key, ...]:
    """The keys of a table in their order."""
    found = []
    for of in fields(table):
        section = of.metadata["section"]
        name = f"{section}.{of.name}" if section else of.name
        found.append(Key(name, of.default, of.metadata["takes"], of.metadata["words"]))
    return tuple(found)


def read(reading: Reading, table: type, *, fill: bool = False) -> dict[str, Any]:
    """The values of a table's fields. What is of no use is reported; so is a key that is missing, which with `fill` has
    its default instead.
    """
    found = {}
    for of, one in zip(fields(table), keys_of(table), strict=True):
        is_missing = fill and reading.get(one.name, _MISSING) is _MISSING
        found[of.name] = one.default if is_missing else _read(one.takes, reading, one)
    return found


def _read(kind: Kind, reading: Reading, one: Key) -> Any:
    return kind.read(reading, one) if kind.read is not None else reading.get(one.name)


_MISSING = object()


def values(words: str, is_of_use: Callable[[Any], bool]) -> Kind:
    """The values that a function is true for."""

    def read_value(reading: Reading, one: Key) -> Any:
        before = len(reading.findings.items)
        value = reading.get(one.name)
        if not is_of_use(value) and len(reading.findings.items) == before:
            shown = "missing" if value is None else repr(value)
            help_text = f"it is {words}: {one.words}"
            reading.error("wrong-type", f"{one.name} is {shown}", one.name, help_text)
        return value

    return Kind(words, read_value)


def optional(kind: Kind) -> Kind:
    """As a kind, and null or a missing key for the default."""

    def read_value(reading: Reading, one: Key) -> Any:
        return one.default if reading.get(one.name) is None else _read(kind, reading, one)

    return Kind(f"{kind.words}, or null", read_value)


def whole(least: int, most: int = 2**63 - 1) -> Kind:
    """Whole numbers of a range."""
    upto = "" if most == 2**63 - 1 else f" to {most}"
    return values(f"a whole number from {least}{upto}", lambda v: is_whole(v) and least <= v <= most)


def defaulted(kind: Kind) -> Kind:
    """As `kind`, and the default where the configuration lacks the key: one that was written before there was such a key."""

    def read_value(reading: Reading, one: Key) -> Any:
        return one.default if reading.get(one.name, _MISSING) is _MISSING else _read(kind, reading, one)

    return Kind(kind.words, read_value)


def one_of(*words: str) -> Kind:
    """One of some words."""
    return values(" or ".join(words), lambda value: isinstance(value, str) and value in words)


def _is_number(value: Any) -> bool:
    return (is_whole(value) or isinstance(value, float)) and math.isfinite(value) and value >= 0


number = values("a number from 0", _is_number)
seconds = values("a number of seconds above 0", lambda value: _is_number(value) and value > 0)
seconds_or_0 = values("a number of seconds from 0", _is_number)
share = values("a number above 0 and up to 1", lambda value: _is_number(value) and 0 < value <= 1)
truth = values("true or false", lambda value: isinstance(value, bool))
text = values("a text", lambda value: isinstance(value, str) and bool(value.strip()))
folder = values("a folder's name", lambda value: isinstance(value, str) and bool(value.strip()))
