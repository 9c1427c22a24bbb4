"""Where a key of the composed configuration was written: in an override, or in which line of which file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelizer.diagnostics import PlanError, Span
from parallelizer.source import MappingNode, Node, Scalar, SequenceNode, read, read_text, shown_path

MAX_DEPTH = 8
"""How deep defaults lists and interpolations are followed."""

NOWHERE = Span("<configuration>")
"""The place of what was set in a way that cannot be told."""

_INTERPOLATION = re.compile(r"\$\{([\w.-]+)\}")


@dataclass(frozen=True)
class _Default:
    """An item of a defaults list: a config by its path, and the group that it is an option of, if any."""

    config: str
    group: str | None = None


@dataclass(frozen=True)
class _File:
    """A config file: its content, the key that the content goes under, and its defaults list."""

    node: MappingNode
    package: tuple[str, ...]
    defaults: tuple[_Default, ...]


_SELF = _Default("_self_")


@dataclass(frozen=True)
class Origins:
    """The overrides, what each config group was set to, the folders that are searched, the root config."""

    overrides: Sequence[str] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    folders: Sequence[Path] = ()
    root: str = "train"
    files: dict[str, _File | None] = field(default_factory=dict, repr=False, compare=False)
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
            return _key_in_override(override, key)
        written = self._written(key)
        return written[0].span if written is not None and written[0] is not None else None

    def node(self, key: str, value: Any) -> Node:
        """`value`, which the configuration has under `key`, as the node that it was written as.

        So its parts have places of their own wherever that can be told.
        """
        override = self._override(key)
        if override is not None:
            return _InOverride(override).node(value)
        written = self._written(key)
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
            return override
        written = self._written(key)
        if written is None:
            return None
        node = written[1]
        named = (
            _INTERPOLATION.fullmatch(node.text) if isinstance(node, Scalar) and depth < MAX_DEPTH else None
        )
        return (self._span(named[1], depth + 1) if named else None) or node.span

    def _group_span(self, key: str) -> Span | None:
        """The override that chose the key's group, or the chosen file."""
        group = key.partition(".")[0]
        if group not in self.choices or group == key:
            return None
        path = _find(f"{group}/{self.choices[group]}", self.folders)
        return self._override(group) or (Span(shown_path(path)) if path else None)

    def _override(self, key: str) -> Span | None:
        """The value of the last override that sets the key or something around it."""
        for override in reversed(self.overrides):
            name, _, value = override.partition("=")
            name = name.lstrip("+~")
            if name == key or (key.startswith(f"{name}.") and name not in self.choices):
                start = len(override) - len(value) + 1
                return Span(f"<override {override}>", 1, start, start + max(len(value), 1))
        return None

    def _written(self, key: str) -> tuple[Scalar | None, Node] | None:
        """The key and its value as they stand in the files; of several files, in the one that counts."""
        return next(self._search(self.root, tuple(key.split(".")), 0), None)

    def _search(self, config: str, key: tuple[str, ...], depth: int) -> Iterator[tuple[Scalar | None, Node]]:
        """A key in a config file and in those of its defaults list; what counts comes first."""
        if config not in self.files:
            self.files[config] = _read_config(config, self.folders)
        file = self.files[config]
        if file is None or depth > MAX_DEPTH:
            return
        for default in reversed(file.defaults):
            if default != _SELF:
                for chosen in self._chosen(default):
                    yield from self._search(chosen, key, depth + 1)
            elif key[: len(file.package)] == file.package:
                found = _locate(file.node, key[len(file.package) :])
                if found is not None:
                    yield found

    def _chosen(self, default: _Default) -> list[str]:
        """The configs that an item of a defaults list stands for, the last one first."""
        if default.group is None or default.group not in self.choices:
            return [default.config]
        chosen = self.choices[default.group]
        options = chosen if isinstance(chosen, list | tuple) else [chosen]
        return [f"{default.group}/{option}" for option in reversed(options)]


def _find(config: str, folders: Sequence[Path]) -> Path | None:
    return next((path for folder in folders if (path := folder / f"{config}.yaml").is_file()), None)


def _read_config(config: str, folders: Sequence[Path]) -> _File | None:
    """A config by its path in the first of the folders that has it; None for what cannot be read."""
    path = _find(config, folders)
    if path is None:
        return None
    try:
        text = read_text(str(path), shown_path(path))
        node = read(text, shown_path(path), trusted=True)
    except PlanError:
        return None
    if not isinstance(node, MappingNode):
        return None
    group = config.rpartition("/")[0]
    defaults = list(_defaults(node.get("defaults"), group))
    if _SELF not in defaults:
        defaults.append(_SELF)
    return _File(node, _package(text, group), tuple(defaults))


def _package(text: str, group: str) -> tuple[str, ...]:
    """Where a file's content goes: under its group, unless its first lines have `# @package ...`."""
    header = re.match(r"(?:\s*#[^\n]*\n)*?\s*#\s*@package\s+(\S+)", text)
    package = header[1] if header else "_group_"
    if package == "_global_":
        return ()
    dotted = package.replace("_group_", group.replace("/", "."))
    return tuple(dotted.split(".")) if dotted else ()


def _defaults(node: Node | None, group: str) -> Iterator[_Default]:
    """The items of a defaults list that stand for files; `override` ones tell what others are set to."""

    def absolute(path: str) -> str:
        path = path.partition("@")[0]
        return path[1:] if path.startswith("/") else f"{group}/{path}".lstrip("/")

    for item in node.items if isinstance(node, SequenceNode) else ():
        if isinstance(item, Scalar):
            yield _SELF if item.text == "_self_" else _Default(absolute(item.text))
        for key, value in item if isinstance(item, MappingNode) else ():
            words = key.text.split()
            if words and "override" not in words:
                of = absolute(words[-1])
                option = value.text if isinstance(value, Scalar) else ""
                yield _Default(f"{of}/{option}", of)


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


def _key_in_override(value: Span, key: str) -> Span:
    text = value.file.removeprefix("<override ").removesuffix(">")
    name = text[: value.column - 2]
    if name.lstrip("+~") != key:
        return value
    last = name.rpartition(".")[2].lstrip("+~")
    return Span(value.file, 1, len(name) - len(last) + 1, len(name) + 1)


def _text(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
