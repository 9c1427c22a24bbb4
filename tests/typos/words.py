"""The words of a plan or a preset that a person may misspell, with their kinds and places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parallelizer.language.plan import AXES
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, SequenceNode, read

CLAIMED = ("glob", "style", "axis", "option")
"""The kinds that the figure of the README is about; the others are counted beside it."""


@dataclass(frozen=True)
class Word:
    """A word in a file: what it is, and where it stands (line and column from 0, without quotes)."""

    kind: str
    text: str
    line: int
    column: int


def words_of(path: Path) -> list[Word]:
    """The words of a plan, or the axes of a preset, in order."""
    node = read(path.read_text(), str(path), trusted=path.parent.name == "parallel")
    if not isinstance(node, MappingNode):
        raise ValueError(f"{path} is no map")
    found = _mesh(node) if path.parent.name == "parallel" else _plan(node)
    return sorted((word for word in found if word is not None), key=lambda w: (w.line, w.column))


def _mesh(node: MappingNode) -> Iterator[Word | None]:
    mesh = node.get("mesh")
    for key, _ in mesh if isinstance(mesh, MappingNode) else ():
        yield _word("axis", key)


def _plan(node: MappingNode) -> Iterator[Word | None]:
    for key, value in node:
        yield _word("section", key)
        if key.text == "rules" and isinstance(value, MappingNode):
            for glob, body in value:
                yield _word("glob", glob)
                yield from _body(body)
        elif key.text == "layouts" and isinstance(value, MappingNode):
            for name, placement in value:
                yield _word("layout name", name)
                yield from _leaves(placement, "placement")
        elif key.text == "buffers" and isinstance(value, MappingNode):
            for section, entries in value:
                yield _word("section", section)
                for name, dim in entries if isinstance(entries, MappingNode) else ():
                    yield _word("buffer", name)
                    for part, value in dim if isinstance(dim, MappingNode) else ():
                        yield _word("section", part)
                        yield from _leaves(value, "buffer's dimension" if part.text == "dim" else "padding")
                    yield from _leaves(dim, "buffer's dimension")
        else:
            yield from _leaves(value, "plan's name" if key.text == "extends" else "version")


def _body(node: Node) -> Iterator[Word | None]:
    if isinstance(node, Scalar):
        yield _word("style", node)
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _body(item)
    else:
        for key, value in node:
            yield _word("option", key)
            if key.text == "style":
                yield from _leaves(value, "style")
            elif key.text == "axis":
                yield from _leaves(value, "axis")
            else:
                yield from _value(value)


def _value(node: Node) -> Iterator[Word | None]:
    if isinstance(node, MappingNode):
        for key, value in node:
            yield _word("axis" if key.text in AXES else "input or parameter", key)
            yield from _value(value)
    else:
        yield from _leaves(node, "option's value")


def _leaves(node: Node, kind: str) -> Iterator[Word | None]:
    if isinstance(node, Scalar):
        yield _word(kind, node)
    elif isinstance(node, SequenceNode):
        for item in node.items:
            yield from _leaves(item, kind)


def _word(kind: str, scalar: Scalar) -> Word | None:
    """The word, if every character of it stands in the file."""
    if not scalar.verbatim:
        return None
    span = scalar.span
    return Word(kind, scalar.text, span.line - 1, span.column - 1 + (0 if scalar.plain else 1))
