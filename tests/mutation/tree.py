"""A plan as a tree of plain dicts, lists and texts, for edits, and back to YAML with one line to a rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, SequenceNode, read_file

Tree = dict[str, Any]
Where = tuple[str | int, ...]
"""The keys and indices from the root to a node."""

SECTIONS = ("layouts", "rules")
_PLAIN = re.compile(r"[A-Za-z0-9_][\w.()/+ -]*(-> [\w() -]+)?")


@dataclass(frozen=True)
class Place:
    """A word of a plan: what part it plays (`glob`, `style`, `option`, `choice`, `placement`, `layout`, `name`,
    `buffer`, `dim`), where it stands, and whether it is a key there.
    """

    part: str
    where: Where
    is_key: bool
    text: str


def read_tree(path: Path) -> Tree:
    """The file's tree, with what it `extends` put into it: its rules first, other sections key by key."""
    node = read_file(str(path), str(path))
    assert isinstance(node, MappingNode)
    tree: Tree = _plain(node)
    if "extends" not in tree:
        return tree
    parent = read_tree(path.parent / f"{tree.pop('extends')}.yaml")
    for section, value in tree.items():
        parent[section] = {**parent.get(section, {}), **value} if isinstance(value, dict) else value
    return parent


def _plain(node: Node) -> Any:
    if isinstance(node, MappingNode):
        return {key.text: _plain(value) for key, value in node}
    if isinstance(node, SequenceNode):
        return [_plain(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.text


def write_tree(tree: Tree) -> str:
    """The plan as YAML text."""
    lines = []
    for section, value in tree.items():
        if not isinstance(value, dict) or not value:
            lines.append(f"{section}: {_flow(value)}")
            continue
        lines.append(f"{section}:")
        lines += [f"  {_text(key, section != 'layouts')}: {_flow(entry)}" for key, entry in value.items()]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(k, '*' in k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _text(str(value), False)


def _text(text: str, quotes: bool) -> str:
    return f'"{text}"' if quotes or not _PLAIN.fullmatch(text) else text


def replaced(tree: Any, where: Where, change: Callable[[Any], Any]) -> Any:
    """The tree with one value changed."""
    if not where:
        return change(tree)
    first, rest = where[0], where[1:]
    if isinstance(tree, list):
        return [replaced(item, rest, change) if i == first else item for i, item in enumerate(tree)]
    return {key: replaced(item, rest, change) if key == first else item for key, item in tree.items()}


def removed(tree: Any, where: Where) -> Any:
    """The tree without one entry."""
    *around, last = where
    return replaced(tree, tuple(around), lambda entries: {k: v for k, v in entries.items() if k != last})


def renamed(tree: Any, where: Where, key: str) -> Any | None:
    """The tree with another key, at its place; None where it has that key already."""
    *around, last = where
    holder = tree
    for step in around:
        holder = holder[step]
    if key in holder:
        return None
    return replaced(
        tree, tuple(around), lambda entries: {key if k == last else k: v for k, v in entries.items()}
    )


def value_at(tree: Any, where: Where) -> Any:
    """The value that stands there."""
    for step in where:
        tree = tree[step]
    return tree


def uses(tree: Tree) -> Iterator[tuple[str, Where, str, dict[str, Any]]]:
    """Every style that a rule gives: (the rule's glob, where the style's entry stands, its name, its options)."""
    for glob, value in tree.get("rules", {}).items():
        listed = isinstance(value, list)
        for index, use in enumerate(value if listed else [value]):
            where: Where = ("rules", glob, index) if listed else ("rules", glob)
            if isinstance(use, str):
                yield glob, where, use, {}
            else:
                yield glob, where, use["style"], {k: v for k, v in use.items() if k != "style"}


def places(tree: Tree) -> Iterator[Place]:
    """Every word of the plan that a hand may slip at."""
    for name, value in tree.get("layouts", {}).items():
        yield Place("layout", ("layouts", name), True, name)
        yield Place("placement", ("layouts", name), False, value)
    for glob in tree.get("rules", {}):
        yield Place("glob", ("rules", glob), True, glob)
    for _, where, style, options in uses(tree):
        entry = value_at(tree, where)
        yield Place("style", where if isinstance(entry, str) else (*where, "style"), False, style)
        for option, value in options.items():
            yield Place("option", (*where, option), True, option)
            yield from _values((*where, option), option, value)
    for section, entries in tree.get("buffers", {}).items():
        for name, said in entries.items():
            yield Place("buffer", ("buffers", section, name), True, name)
            if isinstance(said, dict):
                for key in said:
                    yield Place("option", ("buffers", section, name, key), True, key)
                yield Place("dim", ("buffers", section, name, "dim"), False, said["dim"])
            else:
                yield Place("dim", ("buffers", section, name), False, said)


def _values(where: Where, option: str, value: Any) -> Iterator[Place]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield Place("name", (*where, name), True, name)
            yield from _values((*where, name), option, below)
    elif isinstance(value, str) and option in ("input", "output", "layout"):
        yield Place("placement", where, False, value)
    elif isinstance(value, str):
        yield Place("choice", where, False, value)
