"""YAML text to a tree of nodes that know their file, line and column.

Plans are data from strangers: this reader builds nothing but text, refuses tags, anchors and aliases, and bounds size and
depth before anything is built. It walks the parser's events with its own stack, because PyYAML's composer recurses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from parallelizer.diagnostics import Diagnostic, PlanError, Span

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 50_000


@dataclass(frozen=True)
class Scalar:
    """A scalar's text as written, before YAML gives it a type. `plain` tells that it stood without quotes."""

    text: str
    plain: bool
    span: Span

    @property
    def yaml_type(self) -> str:
        """The type YAML 1.1 would give this text: str, int, float, bool, null, timestamp, merge, value."""
        if not self.plain:
            return "str"
        tag: str = _RESOLVER.resolve(yaml.ScalarNode, self.text, (True, False))
        return tag.rsplit(":", 1)[-1]


@dataclass(frozen=True)
class MappingNode:
    """Keys and values in the order written; keys are scalars and unique."""

    entries: tuple[tuple[Scalar, Node], ...]
    span: Span

    def __iter__(self) -> Iterator[tuple[Scalar, Node]]:
        return iter(self.entries)

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


@dataclass
class _Open:
    """A collection whose end event has not come yet."""

    mapping: bool
    span: Span
    items: list[Node]


@dataclass(frozen=True)
class _Place:
    """Turns marks of the text into spans of the file; a text inside another one starts at `origin`."""

    file: str
    origin: Span | None

    def span(self, start: yaml.Mark, end: yaml.Mark) -> Span:
        column, width = start.column + 1, max(end.column - start.column, 1)
        line = start.line + 1
        if end.line != start.line:
            width = 1
        if self.origin is None:
            return Span(self.file, line, column, column + width)
        if line == 1:
            column += self.origin.column - 1
        return Span(self.file, line + self.origin.line - 1, column, column + width)


def read(text: str, file: str, origin: Span | None = None) -> Node | None:
    """Read one YAML document. Returns None for an empty one.

    `origin` places a text that stands inside another file (a rule in a preset's list, an override).
    Raises PlanError with one diagnostic: the text cannot be read beyond the first of these mistakes.
    """
    place = _Place(file, origin)
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise _error("yaml-limit", f"the file is larger than {MAX_BYTES:,} bytes", Span(file))
    try:
        return _build(text, place)
    except yaml.MarkedYAMLError as error:
        raise PlanError([_syntax(error, text, place)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        raise _error(
            "yaml-syntax", f"the character {error.character!r} is not allowed in YAML", Span(file, line, column, column + 1)
        ) from None


def read_file(path: str, shown: str) -> Node | None:
    """Read a file; `shown` is its name in diagnostics. Raises PlanError when it cannot be read or is empty."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _error("file-unreadable", f"cannot read {shown}: {reason}", Span(shown)) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _error("yaml-syntax", f"byte {error.start} is not UTF-8 text", Span(shown, line)) from None
    return read(text, shown)


def shown_path(path: Path) -> str:
    """A path as a user would type it: relative where it lies below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _build(text: str, place: _Place) -> Node | None:
    stack: list[_Open] = []
    root: Node | None = None
    count = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _error("yaml-syntax", "a second document starts here", place.span(event.start_mark, event.end_mark),
                             "one file holds one plan: remove the `---` line")
        if not isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            continue
        span = place.span(event.start_mark, event.end_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _unquoted(text, event, span)
        if getattr(event, "tag", None) is not None:
            raise _error("yaml-tag", f"the tag {event.tag!r} is not allowed", span,
                         "a plan is data: quote the text if it begins with `!`")
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = Scalar(event.value, event.style is None, span)
        elif isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Open(isinstance(event, yaml.MappingStartEvent), span, []))
            if len(stack) > MAX_DEPTH:
                raise _error("yaml-limit", f"nested deeper than {MAX_DEPTH} levels", span)
            continue
        else:
            node = _close(stack.pop(), text)
        count += 1
        if count > MAX_NODES:
            raise _error("yaml-limit", f"more than {MAX_NODES:,} values", node.span)
        if stack:
            stack[-1].items.append(node)
        else:
            root = node
    return None if isinstance(root, Scalar) and root.plain and root.text == "" else root


def _close(opened: _Open, text: str) -> Node:
    if not opened.mapping:
        return SequenceNode(tuple(opened.items), opened.span)
    entries: list[tuple[Scalar, Node]] = []
    seen: dict[str, Scalar] = {}
    for key, value in zip(opened.items[::2], opened.items[1::2], strict=True):
        if not isinstance(key, Scalar):
            raise _error("unquoted-glob", "this key is a list or a map", key.span,
                         "a glob that begins with `[` or `{` needs quotes")
        if key.text in seen:
            raise _error("duplicate-key", f"the key {key.text!r} stands twice", key.span,
                         f"it was first written in line {seen[key.text].span.line}; keep one of the two")
        seen[key.text] = key
        entries.append((key, value))
    return MappingNode(tuple(entries), opened.span)


def _unquoted(text: str, event: yaml.Event, span: Span) -> PlanError:
    line = text.split("\n")[event.start_mark.line]
    written = line[event.start_mark.column :].split(":")[0].split()[0]
    kind = "alias" if isinstance(event, yaml.AliasEvent) else "anchor"
    return _error(
        "unquoted-glob",
        f"YAML reads {written} as an {kind}, not as text",
        replace(span, end_column=span.column + len(written)),
        f'put it in quotes: "{written}"; plans have no anchors or aliases',
    )


def _syntax(error: yaml.MarkedYAMLError, text: str, place: _Place) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return Diagnostic("yaml-syntax", str(error), Span(place.file))
    lines = text.split("\n")
    line = lines[mark.line] if mark.line < len(lines) else ""
    span = place.span(mark, mark)
    problem = (error.problem or "this is not YAML").replace("could not found", "could not find")
    help_text = None
    if "\t" in line[: mark.column + 1]:
        problem, help_text = "a tab stands where YAML wants spaces", "indent with spaces"
    elif line.lstrip()[:1] in ("*", "&", "!", "[", "{", "%", "@", "`"):
        key = line.strip().split(": ")[0].rstrip(":")
        start = len(line) - len(line.lstrip())
        span = place.span(_at(mark, start), _at(mark, start + len(key)))
        return Diagnostic("unquoted-glob", f"a key that begins with {key[:1]!r} is YAML syntax, not text", span,
                          f'put it in quotes: "{key}"')
    elif "mapping values are not allowed" in problem:
        problem, help_text = "a second `:` stands in this line", "indent what belongs to the key, or quote the text"
    elif "found undefined alias" in problem:
        help_text = "quote a glob that begins with `*`"
    return Diagnostic("yaml-syntax", problem, span, help_text)


def _at(mark: yaml.Mark, column: int) -> yaml.Mark:
    return yaml.Mark(mark.name, mark.index, mark.line, column, None, 0)


def _error(code: str, message: str, span: Span, help_text: str | None = None) -> PlanError:
    return PlanError([Diagnostic(code, message, span, help_text)])
