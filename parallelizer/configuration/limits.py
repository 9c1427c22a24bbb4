"""What a configuration may come to before anything is built from it: values, depth, bytes.

Presets and overrides are trusted, but they can be harmful by accident or on purpose: 287 bytes of
YAML aliases keep OmegaConf busy for a minute, 24 interpolations that each name the next one twice are millions
of values, and deep brackets end in a RecursionError. So files and overrides are measured before Hydra reads
them, and interpolations before OmegaConf fills them in. None of this builds what it measures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span, quoted
from parallelizer.language.yaml_mistakes import Position
from parallelizer.language.yaml_nodes import MAX_BYTES, MAX_DEPTH, MAX_NODES, Place, read_text, shown_path

MAX_PRESET_NODES = 1_500
"""The most values in a preset; OmegaConf takes a third of a millisecond for each."""

MAX_OVERRIDES = 20_000
"""The most characters in all overrides together; Hydra's parser takes a millisecond for 30."""

Size = tuple[int, int]
"""So many values and so many characters."""


# --- files -------------------------------------------------------------------------------------


def check_files(folders: Sequence[Path], overrides: Sequence[str], config_name: str) -> None:
    """Raise PlanError for a YAML file along the search path that is too much, if it may be asked for.

    A file may be asked for when its name stands in an override, or in a file that may be asked for itself; no
    other is opened. Only those that could be too much are looked into: it takes milliseconds.
    """
    every = [
        path for folder in folders for path in sorted(folder.rglob("*.yaml")) if path.parent.name != "plans"
    ]
    said = [config_name, *overrides]
    while asked := [path for path in every if any(path.stem in text for text in said)]:
        said = []
        for path in asked:
            every.remove(path)
            said.append(_measured(path))


def _measured(path: Path) -> str:
    """The text of a file that is not too much; an empty one where there is nothing to measure. Raises
    PlanError.
    """
    try:
        text = read_text(str(path), shown_path(path))
    except PlanError as error:
        if error.diagnostics[0].code == "yaml-limit":
            raise
        return ""  # reported when it is used
    most = MAX_PRESET_NODES if path.parent.name == "parallel" else MAX_NODES
    found = measure(text, shown_path(path), most) if _may_be_too_much(text) else None
    if found is not None:
        raise PlanError([found])
    return text


_INDENTATION = re.compile(r"^[ ?\-:\t]+", re.MULTILINE)


def _may_be_too_much(text: str) -> bool:
    """Whether a text can be over a limit: cheap, and never wrong when it says no.

    A level takes a bracket or a column of indentation, a value a line, a comma or a dash of its own.
    """
    brackets = text.count("[") + text.count("{")
    indentation = max(map(len, _INDENTATION.findall(text)), default=0)
    values = sum(map(text.count, ("\n", "\r", ",", "- ", "? ", "[", "{")))
    return (
        ("&" in text and "*" in text) or brackets + indentation > MAX_DEPTH or values > MAX_PRESET_NODES // 4
    )


def measure(text: str, file: str, most: int = MAX_NODES) -> Diagnostic | None:
    """What is too much in a YAML text with its aliases written out; None if nothing is, or it is no YAML."""
    place = Place(file)
    anchors: dict[str, Size] = {}
    opened: list[tuple[str | None, Size]] = []
    total: Size = (0, 0)
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_event():
            event: Any = loader.get_event()
            size: Size = (0, 0)
            if isinstance(event, yaml.CollectionStartEvent):
                opened.append((event.anchor, total))
                size = (1, 0)
            elif isinstance(event, yaml.ScalarEvent):
                size = (1, len(event.value))
            elif isinstance(event, yaml.AliasEvent):
                size = anchors.get(event.anchor or "", (1, 0))
            total = (total[0] + size[0], total[1] + size[1])
            if isinstance(event, yaml.ScalarEvent) and event.anchor:
                anchors[event.anchor] = size
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = opened.pop()
                if anchor:
                    anchors[anchor] = (total[0] - before[0], total[1] - before[1])
            reason = _too_much(total, len(opened), most)
            if reason:
                span = place.span(Position.of(event.start_mark), 1)
                aliased = " with its aliases written out" if anchors else ""
                return Diagnostic("yaml-limit", f"the file holds {reason}{aliased}", span, "split the file")
    except (yaml.YAMLError, ValueError, OverflowError):
        return None  # what is no YAML is told when it is read
    return None


def _too_much(size: Size, depth: int, most: int) -> str | None:
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} levels"
    if size[0] > most:
        return f"more than {most:,} values"
    return f"more than {MAX_BYTES:,} characters" if size[1] > MAX_BYTES else None


# --- overrides -----------------------------------------------------------------------------------


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise PlanError for overrides that are too long or too deep for Hydra's parser."""
    length = 0
    for override in overrides:
        length += len(override)
        shown = Span(f"<override {override[:200]}>", 1, 1, min(len(override), 200) + 1)
        if length > MAX_OVERRIDES:
            message = f"the overrides are longer than {MAX_OVERRIDES:,} characters"
            raise PlanError([Diagnostic("yaml-limit", message, shown, "put them into a configuration file")])
        depth = 0
        for character in override:
            depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(character, 0)
            if depth > MAX_DEPTH:
                message = f"{quoted(override)} is nested deeper than {MAX_DEPTH} levels"
                raise PlanError([Diagnostic("yaml-limit", message, shown, "a rule needs five")])


# --- interpolations ------------------------------------------------------------------------------

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_KEY = re.compile(r"\.*[\w\-]+(?:\.[\w\-]+|\[[\w\-]+\])*")


def grown_key(tree: Any) -> tuple[str, str] | None:
    """The dotted key whose interpolations make a plain, unresolved tree too large, and what it comes to.

    None if nothing is too large. Every interpolation is counted as often as it would be filled in; those in a
    circle once, because OmegaConf refuses them itself.
    """
    known: dict[str, Size] = {}
    for key, value in _leaves(tree, ""):
        if isinstance(value, str) and "${" in value:
            reason = _too_much(_size(tree, value, key, known, set()), 0, MAX_NODES)
            if reason:
                return key, reason
    return None


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    below = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if below is None:
        yield key, value
    else:
        for name, part in below:
            yield from _leaves(part, f"{key}.{name}" if key else str(name))


def _size(tree: Any, value: Any, key: str, known: dict[str, Size], open_keys: set[str]) -> Size:
    """The size of a value with its interpolations filled in."""
    if key in known:
        return known[key]
    if isinstance(value, dict | list):
        if key in open_keys:
            return 1, 1
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        inner = open_keys | {key}
        sizes = [
            _size(tree, part, f"{key}.{name}" if key else str(name), known, inner) for name, part in parts
        ]
        known[key] = 1 + sum(s[0] for s in sizes), sum(s[1] for s in sizes)
        return known[key]
    if not isinstance(value, str) or "${" not in value:
        return 1, len(str(value))
    if key in open_keys or len(open_keys) > 200:
        return 1, 1
    nodes, length = 1, len(value)
    for inside in _INTERPOLATION.findall(value):
        for named in _KEY.findall(inside):
            target = _target(named, key)
            found, there = _select(tree, target)
            if there:
                size = _size(tree, found, target, known, open_keys | {key})
                nodes, length = nodes + size[0], length + size[1]
    known[key] = nodes, length
    return known[key]


def _target(named: str, key: str) -> str:
    """The absolute key of a name in an interpolation; each dot in front after the first goes one level up."""
    name = named.lstrip(".")
    up = len(named) - len(name)
    name = re.sub(r"\[([\w\-]+)\]", r".\1", name)
    if not up:
        return name
    return ".".join([*key.split(".")[:-up], name])


def _select(tree: Any, key: str) -> tuple[Any, bool]:
    for part in key.split("."):
        if isinstance(tree, dict):
            matching = next((name for name in tree if str(name) == part), None)
            if matching is None:
                return None, False
            tree = tree[matching]
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None, False
    return tree, True
