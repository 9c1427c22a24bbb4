"""PyYAML's errors in the terms of the plan language, at the place of the mistake.

YAML gives `*`, `&`, `!`, `[`, `{` at the beginning of a text meanings of its own, and globs begin with them:
most of what goes wrong is a missing pair of quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import yaml

from parallelizer.diagnostics.diagnostic import LINE_BREAK, Diagnostic, Span, quoted, shortened


class Position(NamedTuple):
    """A place in a text: line and column from 0."""

    line: int
    column: int

    @classmethod
    def of(cls, mark: Any) -> Position:
        """The position of PyYAML's mark."""
        return cls(mark.line, mark.column)


SpanOf = Callable[[Position, int], Span]
"""The span of so many columns from a position on."""

_READ_AS = {
    "*": "an alias",
    "&": "an anchor",
    "!": "a tag",
    "[": "a list",
    "{": "a map",
    "%": "a directive",
    "@": "a reserved character",
    "`": "a reserved character",
}


def explain(error: yaml.MarkedYAMLError, text: str, span_of: SpanOf) -> Diagnostic:
    """The diagnostic for an error of PyYAML's scanner, parser or constructor in `text`."""
    context, problem = error.context or "", error.problem or "this is not YAML"
    mark = Position.of(error.problem_mark or error.context_mark)
    began = Position.of(error.context_mark or error.problem_mark)

    def finding(
        code: str, message: str, start: Position, help_text: str | None, length: int = 1
    ) -> Diagnostic:
        return Diagnostic(code, message, span_of(start, length), help_text)

    line = _line(text, mark)
    here = line[mark.column : mark.column + 1]
    if context.startswith("while scanning a") and context.endswith(("alias", "anchor", "tag", "directive")):
        return (tag if is_tag(word_at(text, began)) else unquoted)(began, text, span_of)
    if here == "\t" or "\t" in line[: _indent(text, mark.line)]:
        tab = Position(mark.line, line.index("\t"))
        return finding("yaml-syntax", "there is a tab where YAML needs blanks", tab, "indent with blanks")
    if here in _READ_AS and "cannot start any token" in problem:
        return unquoted(mark, text, span_of)
    if line[: mark.column + 1].endswith("${"):
        help_text = "plans have no interpolations: write the value itself; in other files put it in quotes"
        message, dollar = (
            "YAML cannot read an interpolation without quotes",
            Position(mark.line, mark.column - 1),
        )
        return finding(
            "interpolation", message, dollar, help_text, line.find("}", mark.column) + 1 - dollar.column
        )
    if here and here in "]}" and "flow" not in context:
        return finding("yaml-syntax", f"this `{here}` has no opening bracket", mark, "remove it")
    if bracket := _bracket_before(line, mark):
        return unquoted(bracket, text, span_of)
    if "quoted scalar" in context:
        if "escape" in problem:
            return finding(
                "yaml-syntax",
                f"`\\{here}` is not an escape sequence of YAML",
                mark,
                "write the text in single quotes",
            )
        return finding("yaml-syntax", "this quote is never closed", began, "close it in the same line")
    if "mapping values are not allowed" in problem:
        # Without a colon of its own before, the line was read as the continuation of the text above it.
        above = None if re.search(r":\s", line[: mark.column]) else _line_above(text, mark.line)
        if above is None:
            help_text = "write one key in each line; put a text that contains `: ` in quotes"
            return finding("yaml-syntax", "there is a second `:` in this line", mark, help_text)
        if re.search(r":(\s|$)", _line(text, Position(above, 0))):
            start, help_text = Position(mark.line, _indent(text, mark.line)), "begin it in the same column"
            return finding(
                "yaml-syntax", "this line is indented deeper than the one above it", start, help_text
            )
        context, began = "simple key", Position(above, _indent(text, above))
    if "simple key" in context:
        help_text = "write `glob: style`, with a blank behind the colon"
        written = _line(text, began)[began.column :].split(" #")[0].rstrip()
        return finding("yaml-syntax", "this line has no `: `", began, help_text, len(written))
    if "flow" in context:
        opening = _line(text, began)[began.column : began.column + 1]
        if opening not in ("[", "{"):
            return finding("yaml-syntax", "the text ends inside `[` or `{`", mark, "close what was opened")
        if mark.line != began.line or not here:
            help_text = "close it; a glob that begins with it needs quotes"
            return finding("yaml-syntax", f"this `{opening}` is never closed", began, help_text)
        closing = {"{": "}", "[": "]"}[opening]
        help_text = "put it here, or put a text that contains `: ` in quotes"
        return finding("yaml-syntax", f"a `,` or the closing `{closing}` is missing here", mark, help_text)
    if here == ":" and not line[: mark.column].strip():
        return finding("yaml-retyped", "there is no key before the colon", mark, '"" is the root module')
    if "block" in context:
        help_text = "lines of one map or list begin in the same column"
        return finding("yaml-syntax", "this line is not indented like those above it", mark, help_text)
    if "<document start>" in problem:
        return finding(
            "yaml-syntax", "the document has ended above this line", mark, "a file is one document"
        )
    if "duplicate key" in problem:
        key = problem.rpartition(" ")[2]
        return finding(
            "duplicate-key", f"the key {quoted(key)} occurs twice", mark, "keep one of the two", len(key)
        )
    if "constructor for the tag" in problem:
        written = word_at(text, mark)
        return finding(
            "yaml-tag", f"the tag {quoted(written)} is not allowed", mark, "leave the tag out", len(written)
        )
    if "unhashable key" in problem:
        return finding("yaml-syntax", "this key is a list or a map", mark, "a key is text: put it in quotes")
    return finding("yaml-syntax", problem, mark, "put a text with YAML's own characters in quotes")


_TAG = re.compile(r"!(<|[\w-]*!)")


def is_tag(word: str) -> bool:
    """Whether a word that begins with `!` is a tag in full, as `!!python/name:x.y`, `!<tag:x>` and `!e!x.y`
    are: no glob that has lost its quotes.
    """
    return _TAG.match(word) is not None


def tag(start: Position, text: str, span_of: SpanOf) -> Diagnostic:
    """The diagnostic for a tag."""
    written = shortened(word_at(text, start))
    help_text = "a plan is data: leave the tag out, or quote a text that begins with `!`"
    return Diagnostic(
        "yaml-tag", f"the tag `{written}` is not allowed", span_of(start, len(written)), help_text
    )


def unquoted(start: Position, text: str, span_of: SpanOf) -> Diagnostic:
    """The diagnostic for a text that begins at `start` with a character that YAML has taken for syntax."""
    start = glob_start(text, start)
    written = shortened(word_at(text, start))
    quotes = "'" if '"' in written or "\\" in written else '"'
    read_as = _READ_AS.get(written[:1], "syntax")
    return Diagnostic(
        "unquoted-glob",
        f"YAML reads `{written}` as {read_as}, not as text",
        span_of(start, len(written)),
        f"a glob that begins with `{written[:1]}` needs quotes: {quotes}{written}{quotes}",
    )


def unreadable_character(error: yaml.reader.ReaderError, text: str, span_of: SpanOf) -> Diagnostic:
    """The diagnostic for a character that YAML forbids."""
    lines = LINE_BREAK.split(text[: error.position])
    message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
    return Diagnostic(
        "yaml-syntax", message, span_of(Position(len(lines) - 1, len(lines[-1])), 1), "remove it"
    )


def glob_start(text: str, at: Position) -> Position:
    """Where the glob begins that `at` is in: in the key `[!q]k` at its bracket; elsewhere, `at` itself."""
    line = _line(text, at)
    first = _indent(text, at.line)
    key = _bracketed(line[first:])
    inside = first < at.column < first + len(key)
    return Position(at.line, first) if inside and line[first + len(key) :].startswith(":") else at


def word_at(text: str, start: Position) -> str:
    """What was meant as one word from `start` on: a key up to its colon, or else up to a blank or comma."""
    line = _line(text, start)
    before, rest = line[: start.column], line[start.column :]
    if bracketed := _bracketed(rest):
        return bracketed
    key = re.match(r"(.+?):(?=\s|$)", rest)
    if key and not before.strip(" -?"):
        return key[1]
    word = re.match(r"[^\s,\]}]+", rest)
    return word[0].removesuffix(":") if word else rest[:1]


def _bracketed(text: str) -> str:
    """The word at the beginning of a text that begins with brackets, if they close: `{a, b}.w[qk]`."""
    depth = 0
    for end, character in enumerate(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(character, 0)
        if not depth and (end == 0 or _WORD_END.match(text, end + 1)):
            return text[: end + 1] if end else ""
    return ""


_WORD_END = re.compile(r":?(\s|[,\]}]|$)")


@lru_cache(maxsize=2)
def _lines(text: str) -> list[str]:
    return LINE_BREAK.split(text)


def _line(text: str, at: Position) -> str:
    lines = _lines(text)
    return lines[at.line] if at.line < len(lines) else ""


def _indent(text: str, number: int) -> int:
    line = _line(text, Position(number, 0))
    return len(line) - len(line.lstrip())


def _line_above(text: str, number: int) -> int | None:
    """The number of the nearest line above that is not blank."""
    return next((n for n in range(number - 1, -1, -1) if _line(text, Position(n, 0)).strip()), None)


def _bracket_before(line: str, at: Position) -> Position | None:
    """Where `[qk]` or `{a,b}` begins that ends right before `at`: the start of a glob without quotes."""
    depth = 0
    for column in range(at.column - 1, -1, -1):
        if line[column] in "]}":
            depth += 1
        elif line[column] in "[{":
            depth -= 1
        if depth == 0:
            return Position(at.line, column) if column < at.column - 1 else None
    return None
