"""YAML text to a tree of nodes that know their file, line and column.

Plans are data from strangers: this reader builds nothing but text, refuses tags, anchors and aliases, and
bounds size and depth before anything is built. It walks the parser's events with its own stack, because
PyYAML's composer recurses.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Related, Span, quoted
from parallelizer.language import yaml_mistakes
from parallelizer.language.yaml_mistakes import Position

MAX_BYTES = 250_000
MAX_DEPTH = 32
MAX_NODES = 20_000


@dataclass(frozen=True)
class Scalar:
    """A scalar's text, before YAML gives it a type.

    `plain` tells that it stood without quotes; `verbatim`, that every character of the text stands in the
    file as it is (no escapes, one line), so that a part of the text has a place of its own.
    """

    text: str
    plain: bool
    span: Span
    verbatim: bool = False

    @property
    def yaml_type(self) -> str:
        """The type YAML 1.1 would give this text: str, int, float, bool, null, timestamp, merge, value."""
        if not self.plain:
            return "str"
        tag: str = _RESOLVER.resolve(yaml.ScalarNode, self.text, (True, False))
        return tag.rsplit(":", 1)[-1]

    def part(self, start: int, end: int) -> Span:
        """Where `text[start:end]` stands, one column at least; the whole scalar if that cannot be told."""
        if not self.verbatim:
            return self.span
        first = self.span.column + (0 if self.plain else 1)
        return replace(self.span, column=first + start, end_column=first + max(end, start + 1))


@dataclass(frozen=True)
class MappingNode:
    """Keys and values in the order written; keys are scalars and unique."""

    entries: tuple[tuple[Scalar, Node], ...]
    span: Span

    def __iter__(self) -> Iterator[tuple[Scalar, Node]]:
        return iter(self.entries)

    def key(self, text: str) -> Scalar | None:
        """A key as it was written, or None."""
        return next((k for k, _ in self.entries if k.text == text), None)

    def get(self, key: str) -> Node | None:
        """The value of a key, or None."""
        return next((v for k, v in self.entries if k.text == key), None)


@dataclass(frozen=True)
class SequenceNode:
    """The items of a list."""

    items: tuple[Node, ...]
    span: Span


Node = Scalar | MappingNode | SequenceNode

_RESOLVER = yaml.SafeLoader("")


@dataclass(frozen=True)
class Place:
    """Turns positions in a text into spans: of `file`, or of the scalar that stands around the text."""

    file: str
    around: Scalar | None = None

    def span(self, at: Position, length: int) -> Span:
        """So many columns from a position on, one at least."""
        if self.around is None:
            return Span(self.file, at.line + 1, at.column + 1, at.column + 1 + max(length, 1))
        return self.around.part(at.column, at.column + length) if at.line == 0 else self.around.span


def read(text: str, file: str, *, trusted: bool = False) -> Node | None:
    """Read one YAML document. Returns None for an empty one.

    In a `trusted` one, a file of the configuration, anchors and tags are passed over, and an alias is a text.
    Raises PlanError with one diagnostic: a text cannot be read beyond the first mistake in its YAML.
    """
    return _read(text, Place(file), trusted)


def read_inside(scalar: Scalar) -> Node | None:
    """As `read`, for YAML that stands inside a scalar: a rule in a preset's list, or in an override."""
    return _read(scalar.text, Place(scalar.span.file, scalar), trusted=False)


def read_file(path: str, shown: str) -> Node | None:
    """Read a file; `shown` is its name in diagnostics. Returns None when it is empty. Raises PlanError."""
    return read(read_text(path, shown), shown)


def read_text(path: str, shown: str, most: int = MAX_BYTES) -> str:
    """The text of a file. Raises PlanError when it cannot be opened, is no regular file, is larger than `most` bytes, or is
    not UTF-8.
    """
    try:
        # Not to wait for a writer, should it be a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError("it is no regular file")
            data = stream.read(most + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        help_text = "check that it is a file, and may be read"
        raise _error("file-unreadable", f"cannot read {shown}: {reason}", Span(shown), help_text) from None
    if len(data) > most:
        raise _too_large(shown, most)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The mistake is counted behind a byte order mark, which an incomplete character may follow.
        line = yaml_mistakes.LINE_BREAK.split(
            data.removeprefix(codecs.BOM_UTF8)[: error.start].decode("utf-8", "ignore")
        )
        span = Span(shown, len(line), len(line[-1]) + 1, len(line[-1]) + 2)
        help_text = "save the file in the encoding UTF-8"
        raise _error("yaml-syntax", f"byte {error.start} is not UTF-8 text", span, help_text) from None


def shown_path(path: str | Path) -> str:
    """A path as a user would type it: relative where it lies below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _read(text: str, place: Place, trusted: bool) -> Node | None:
    if len(text) > MAX_BYTES:
        raise _too_large(place.file)
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        raise PlanError([yaml_mistakes.unreadable_character(error, text, place.span)]) from None
    try:
        return _build(loader, text, place, trusted)
    except yaml.MarkedYAMLError as error:
        raise PlanError([yaml_mistakes.explain(error, text, place.span)]) from None
    except (ValueError, OverflowError):
        # PyYAML computes an escape such as "\UFFFFFFFF" without looking at the result.
        at = Position.of(loader.get_mark())
        help_text = "an escape such as \\U0001F600 names a character that exists"
        raise _error("yaml-syntax", "a number here is too large", place.span(at, 1), help_text) from None


@dataclass
class _Open:
    """A collection whose end event has not come yet; `key` waits for its value."""

    start: yaml.CollectionStartEvent
    items: list[Node] = field(default_factory=list)
    entries: dict[str, tuple[Scalar, Node]] = field(default_factory=dict)
    key: Scalar | None = None

    @property
    def is_map(self) -> bool:
        return isinstance(self.start, yaml.MappingStartEvent)

    def close(self, span: Span) -> Node:
        return (
            MappingNode(tuple(self.entries.values()), span)
            if self.is_map
            else SequenceNode(tuple(self.items), span)
        )


def _build(loader: yaml.SafeLoader, text: str, place: Place, trusted: bool) -> Node | None:
    stack: list[_Open] = []
    root: Node | None = None
    count = documents = 0
    while loader.check_event():
        event: Any = loader.get_event()
        start = Position.of(event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                help_text = "a file is one document: remove the line `---`"
                raise _error("yaml-syntax", "a second document starts here", place.span(start, 3), help_text)
        if not isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            continue
        if not trusted:
            _refuse_machinery(event, text, place)
        node: Node
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Open(event))
            if len(stack) > MAX_DEPTH:
                message = f"nested deeper than {MAX_DEPTH} levels"
                raise _error("yaml-limit", message, place.span(start, 1), "a plan needs five")
            continue
        if isinstance(event, yaml.ScalarEvent):
            node = Scalar(
                event.value, event.style is None, _span(event, event, place), _is_verbatim(event, text)
            )
        elif isinstance(event, yaml.AliasEvent):
            node = Scalar(f"*{event.anchor}", True, _span(event, event, place))
        else:
            opened = stack.pop()
            start = Position.of(opened.start.start_mark)
            node = opened.close(
                _span(opened.start, event if opened.start.flow_style else opened.start, place)
            )
        count += 1
        if count > MAX_NODES:
            raise _error(
                "yaml-limit", f"more than {MAX_NODES:,} values", place.span(start, 1), "split the file"
            )
        if not stack:
            root = node
        elif not stack[-1].is_map:
            stack[-1].items.append(node)
        elif stack[-1].key is not None:
            stack[-1].entries[stack[-1].key.text] = (stack[-1].key, node)
            stack[-1].key = None
        elif isinstance(node, Scalar):
            if not trusted:
                _refuse_question_mark(event, text, place)
            _refuse_twice(node, stack[-1].entries)
            stack[-1].key = node
        else:
            raise PlanError([yaml_mistakes.unquoted(start, text, place.span)])
    return None if isinstance(root, Scalar) and root.plain and root.text == "" else root


def _refuse_machinery(event: Any, text: str, place: Place) -> None:
    """Raise for anchors, aliases and tags."""
    start = Position.of(event.start_mark)
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        raise PlanError([yaml_mistakes.unquoted(start, text, place.span)])
    if getattr(event, "tag", None) is not None:
        written = yaml_mistakes.word_at(text, start)
        looks_like_glob = any(character in written for character in ".*") and not yaml_mistakes.is_tag(
            written
        )
        if looks_like_glob or yaml_mistakes.glob_start(text, start) != start:
            raise PlanError([yaml_mistakes.unquoted(start, text, place.span)])
        raise PlanError([yaml_mistakes.tag(start, text, place.span)])


def _refuse_question_mark(key: Any, text: str, place: Place) -> None:
    """Raise for a key with a `?` right before it: YAML passes over it in `{style: fsdp, ?axis: tp}`."""
    start = Position.of(key.start_mark)
    before = text[max(key.start_mark.index - start.column, 0) : key.start_mark.index]
    if before.endswith("?"):
        at = Position(start.line, len(before) - 1)
        help_text = "leave it out, or put a text that begins with `?` in quotes"
        raise _error(
            "yaml-syntax", "YAML reads this `?` as the beginning of a key", place.span(at, 1), help_text
        )


def _refuse_twice(key: Scalar, entries: Mapping[str, tuple[Scalar, Node]]) -> None:
    if key.text in entries:
        first = Related(entries[key.text][0].span, "it was first written here")
        message = f"the key {quoted(key.text)} occurs twice"
        raise PlanError(
            [Diagnostic("duplicate-key", message, key.span, "keep one of the two", related=(first,))]
        )


def _span(first: Any, last: Any, place: Place) -> Span:
    """From the beginning of one event to the end of another; the beginning alone if lines lie between."""
    start, end = Position.of(first.start_mark), Position.of(last.end_mark)
    return place.span(start, end.column - start.column if start.line == end.line else 1)


def _is_verbatim(event: Any, text: str) -> bool:
    quotes = 0 if event.style is None else 1
    start, end = event.start_mark.index + quotes, event.end_mark.index - quotes
    return event.style in (None, "'", '"') and text[start:end] == event.value


def kind(node: Node) -> str:
    """What a node is, in words."""
    if isinstance(node, Scalar):
        return quoted(node.text) if node.text or not node.plain else "nothing"
    return "a map" if isinstance(node, MappingNode) else "a list"


def _too_large(file: str, most: int = MAX_BYTES) -> PlanError:
    return _error("yaml-limit", f"the file is larger than {most:,} bytes", Span(file), "split the file")


def _error(code: str, message: str, span: Span, help_text: str) -> PlanError:
    return PlanError([Diagnostic(code, message, span, help_text)])
