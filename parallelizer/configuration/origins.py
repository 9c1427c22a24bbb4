"""Where a key of the composed configuration was written: in an override, or in which line of which file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parallelizer.diagnostics.diagnostic import PlanError, Span
from parallelizer.language.yaml_nodes import (
    MappingNode,
    Node,
    Scalar,
    SequenceNode,
    read,
    read_text,
    shown_path,
)

MAX_DEPTH = 8
"""How many interpolations are followed one after another."""

NOWHERE = Span("<configuration>")
"""The place of what was set in a way that cannot be told."""

_INTERPOLATION = re.compile(r"\$\{([\w.-]+)\}")


@dataclass(frozen=True)
class Origins:
    """The overrides, and the config files in the order in which Hydra has merged them.

    Each of `configs` is a config's path in the search path and the dotted key that its content goes under.
    """

    overrides: Sequence[str] = ()
    configs: Sequence[tuple[str, str]] = ()
    folders: Sequence[Path] = ()
    files: dict[str, MappingNode | None] = field(default_factory=dict, repr=False, compare=False)
    """What has been read already."""

    def span(self, key: str) -> Span | None:
        """The narrowest place that set `key`, a dotted path; None when nothing is known of it.

        Of a value that is an interpolation, the place that set what it names; of one that is in no file, the
        file that was chosen for its group.
        """
        return self._span(key, 0) or self._group_span(key)

    def key_span(self, key: str) -> Span | None:
        """Where the last part of `key` itself stands."""
        override = self._override(key)
        if override is not None:
            return override.key
        written = self._written(key)
        return written[0].span if written is not None and written[0] is not None else None

    def set_inside(self, key: str, without: Collection[str] = ()) -> dict[str, Span]:
        """The places of the values that overrides set inside of `key`, by their keys, in their order.

        Left out are the keys `without` right below it, and what only chooses a file.
        """
        found = {}
        for override in self.overrides:
            name = override.partition("=")[0].lstrip("+~")
            below = name.removeprefix(f"{key}.").partition(".")[0]
            if name.startswith(f"{key}.") and below not in without:
                found[name] = _Overridden.whole(override).value
        return found

    def written(self, key: str) -> Node | None:
        """What stands under `key` in the file that set it last; None for an override, and for what is in no file."""
        found = None if self._override(key) else self._written(key)
        return found[1] if found else None

    def node(self, key: str, value: Any) -> Node:
        """`value`, which the configuration has under `key`, as the node that it was written as.

        So its parts have places of their own wherever that can be told.
        """
        override = self._override(key)
        if override is not None and not (override.merged and isinstance(value, Mapping)):
            return _InOverride(override.value).node(value)
        written = self._written(key) if override is None else None
        if written is not None and _says(written[1], value):
            return written[1]
        here = self.span(key) or NOWHERE
        if isinstance(value, Mapping):
            entries = [(str(name), self.node(f"{key}.{name}", below)) for name, below in value.items()]
            spans = [self.key_span(f"{key}.{name}") or node.span for name, node in entries]
            keys = [Scalar(name, False, span) for (name, _), span in zip(entries, spans, strict=True)]
            return MappingNode(tuple(zip(keys, (node for _, node in entries), strict=True)), here)
        if isinstance(value, list | tuple):
            return SequenceNode(tuple(self.node(f"{key}.{at}", item) for at, item in enumerate(value)), here)
        return Scalar(_text(value), not isinstance(value, str), here)

    def _span(self, key: str, depth: int) -> Span | None:
        override = self._override(key)
        if override is not None:
            return override.value
        written = self._written(key)
        if written is None:
            return None
        node = written[1]
        named = _named(node.text, key) if isinstance(node, Scalar) and depth < MAX_DEPTH else None
        return (self._span(named, depth + 1) if named else None) or node.span

    def file_of(self, group: str) -> Span | None:
        """The file that was chosen for a group."""
        chosen = [c for c, package in self.configs if c.startswith(f"{group}/") and package == group]
        path = self._path(chosen[-1]) if chosen else None
        return Span(shown_path(path)) if path else None

    def _group_span(self, key: str) -> Span | None:
        """The override that chose the key's group, or the chosen file."""
        group, _, inside = key.partition(".")
        file = self.file_of(group)
        if not inside or file is None:
            return None
        override = self._override(group)
        return override.value if override else file

    def _override(self, key: str) -> _Overridden | None:
        """What the last override that sets the key, or something around it, says of it.

        A map in an override is merged: it sets the keys that it has and no others.
        """
        for override in reversed(self.overrides):
            name, _, value = override.partition("=")
            name = name.lstrip("+~")
            chooses = self._is_group(name) and not value.lstrip().startswith("{")
            if name != key and (chooses or not key.startswith(f"{name}.")):
                continue
            found = _Overridden.whole(override)
            if override.startswith("~"):
                return found
            if value.lstrip().startswith(("{", "[")):
                inner = _parsed(override)
                if name == key:
                    return replace(found, merged=isinstance(inner, Mapping))
                parts = key[len(name) + 1 :].split(".")
                located = _locate(_InOverride(found.value).node(inner), parts)
                if located is not None:
                    return _Overridden(located[0].span if located[0] else found.value, located[1].span)
                if isinstance(inner, Mapping):
                    continue
            return found
        return None

    def _is_group(self, name: str) -> bool:
        """Whether an override of this name chooses files instead of setting a value."""
        return any((folder / name).is_dir() for folder in self.folders)

    def _written(self, key: str) -> tuple[Scalar | None, Node] | None:
        """The key, if it is one of a map, and its value as they stand in the files; what is merged last
        counts.
        """
        parts = key.split(".")
        for config, package in reversed(self.configs):
            inside = package.split(".") if package else []
            node = self._read(config) if parts[: len(inside)] == inside else None
            found = _locate(node, parts[len(inside) :]) if node is not None else None
            if found is not None:
                return found
        return None

    def _path(self, config: str) -> Path | None:
        return next((path for folder in self.folders if (path := folder / f"{config}.yaml").is_file()), None)

    def _read(self, config: str) -> MappingNode | None:
        """A config's content; None for what cannot be read, and for Hydra's own."""
        if config not in self.files:
            path = self._path(config)
            try:
                shown = shown_path(path) if path else ""
                node = read(read_text(str(path), shown), shown, trusted=True) if path else None
            except PlanError:
                node = None
            self.files[config] = node if isinstance(node, MappingNode) else None
        return self.files[config]


@dataclass(frozen=True)
class _Overridden:
    """The places of a key and of its value in an override; `merged` tells that the value is a map."""

    key: Span
    value: Span
    merged: bool = False

    @classmethod
    def whole(cls, override: str) -> _Overridden:
        """Of the key that the override names. What removes a key is the place of its value."""
        file = f"<override {override}>"
        name, _, value = override.partition("=")
        last = name.rpartition(".")[2].lstrip("+~")
        key = Span(file, 1, len(name) - len(last) + 1, len(name) + 1)
        if override.startswith("~"):
            return cls(key, key)
        start = len(override) - len(value) + 1
        return cls(key, Span(file, 1, start, start + max(len(value), 1)))


def _parsed(override: str) -> Any:
    """The value of an override in plain Python; None for one that Hydra cannot read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        return None


def _named(text: str, key: str) -> str | None:
    """The key that a text names, if it is one interpolation; dots in front count from the key's own map."""
    found = _INTERPOLATION.fullmatch(text)
    if found is None:
        return None
    name = found[1].lstrip(".")
    up = len(found[1]) - len(name)
    around = key.split(".")[:-up] if up else []
    return ".".join([*around, name])


def _locate(node: Node, key: Sequence[str]) -> tuple[Scalar | None, Node] | None:
    """The node under a key, and the key itself if it is one of a map."""
    at: Scalar | None = None
    for part in key:
        below: Node | None = None
        if isinstance(node, MappingNode):
            at, below = node.key(part), node.get(part)
        elif isinstance(node, SequenceNode) and part.isdecimal() and int(part) < len(node.items):
            at, below = None, node.items[int(part)]
        if below is None:
            return None
        node = below
    return at, node


def _says(node: Node, value: Any) -> bool:
    """Whether a node of a file is what the configuration has as `value`."""
    if isinstance(node, Scalar):
        if isinstance(value, Mapping | list | tuple):
            return False
        return node.text == value if isinstance(value, str) else node.yaml_type != "str"
    if isinstance(node, SequenceNode):
        if not isinstance(value, list | tuple) or len(value) != len(node.items):
            return False
        return all(_says(item, v) for item, v in zip(node.items, value, strict=True))
    if not isinstance(value, Mapping) or len(value) != len(node.entries):
        return False
    return all(
        _says(key, name) and _says(below, v)
        for (key, below), (name, v) in zip(node, value.items(), strict=True)
    )


class _InOverride:
    """Finds the parts of an override's value in its text, in their order."""

    def __init__(self, value: Span) -> None:
        self.value = value
        self.text = value.file.removeprefix("<override ").removesuffix(">")
        self.at = value.column - 1

    def node(self, value: Any) -> Node:
        """The value with the places of its parts; of what stands there in other words, the whole place."""
        if isinstance(value, Mapping):
            entries = tuple((self.scalar(str(name)), self.node(below)) for name, below in value.items())
            return MappingNode(entries, self.value)
        if isinstance(value, list | tuple):
            return SequenceNode(tuple(self.node(item) for item in value), self.value)
        return self.scalar(value)

    def scalar(self, value: Any) -> Scalar:
        text = _text(value)
        start = self.text.find(text, self.at) if text else -1
        if start < 0:
            return Scalar(text, not isinstance(value, str), self.value)
        self.at = start + len(text)
        return Scalar(text, True, Span(self.value.file, 1, start + 1, self.at + 1), verbatim=True)


def _text(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
