"""Diagnostics for people: the line that is wrong with carets under it, then what to do."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TextIO

from parallelizer.diagnostics.diagnostic import LINE_BREAK, Diagnostic, Span, counts, in_order

MAX_WIDTH = 120
MIN_WIDTH = 40

Paint = Callable[[str, str], str]
"""Colours a text as a severity or a part of the frame."""

_COLORS = {"error": "31", "warning": "33", "note": "36", "frame": "34"}


def write(diagnostics: Iterable[Diagnostic], stream: TextIO, *, summary: bool = True) -> None:
    """Print diagnostics, errors last, and a line that counts them. Colour is used on a terminal only."""
    ordered = in_order(diagnostics)
    color = stream.isatty()
    width = width_of_terminal()
    for diagnostic in ordered:
        stream.write(render(diagnostic, color=color, width=width) + "\n\n")
    if summary and ordered:
        stream.write(counts(ordered) + "\n")
    stream.flush()


def width_of_terminal() -> int:
    """The columns that text is wrapped at: the terminal's within limits, 100 where there is none."""
    return max(MIN_WIDTH, min(shutil.get_terminal_size((100, 24)).columns, MAX_WIDTH))


def render(diagnostic: Diagnostic, *, color: bool = False, width: int = 100) -> str:
    """One diagnostic as text of several lines, without a newline at the end."""

    def paint(text: str, kind: str) -> str:
        return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if color else text

    head = f"{diagnostic.severity}[{diagnostic.code}]"
    lines = _wrapped(f"{head}: {diagnostic.message}", width, "", "    ")
    lines[0] = paint(head, diagnostic.severity) + lines[0][len(head) :]
    frames: list[tuple[Span, str, str]] = (
        [(diagnostic.span, "", diagnostic.severity)] if diagnostic.span else []
    )
    frames += [(related.span, related.label, "frame") for related in diagnostic.related]
    for index, (span, label, kind) in enumerate(frames):
        lines.append(f"  {paint('-->' if index == 0 else ':::', 'frame')} {_place(span)}")
        lines += _frame(span, label, kind, width, paint)
    if diagnostic.help:
        lines += _wrapped(f"help: {diagnostic.help}", width, "  = ", "          ")
    return "\n".join(lines)


def _wrapped(text: str, width: int, first: str, following: str) -> list[str]:
    """Lines cut at blanks only, so that what is to be typed stays in one piece."""
    return textwrap.wrap(
        _printable(text),
        width,
        initial_indent=first,
        subsequent_indent=following,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _place(span: Span) -> str:
    if span.file.startswith("<override "):
        return "the command line"
    return span.file if span.file.startswith("<") else str(span)


def _frame(span: Span, label: str, kind: str, width: int, paint: Paint) -> list[str]:
    """The source line and its carets; a long line is cut around them. Nothing when there is no such line."""
    text = _line(span)
    if text is None:
        return [f"     {label}"] if label else []
    number = "" if span.file.startswith("<") else str(span.line)
    gutter = max(len(number), 2)
    start = span.column - 1
    length = max(1, min(span.end_column - span.column, len(text) - start))
    room = width - gutter - 3
    if len(text) > room:
        left = max(0, min(start - room // 3, len(text) - room))
        more = len(text) > left + room
        text = ("…" if left else "") + text[left + bool(left) : left + room - more] + ("…" if more else "")
        start -= left
        length = max(1, min(length, room - start))
    mark = "-" if kind == "frame" else "^"
    bar = paint("|", "frame")
    return [
        f"{number:>{gutter}} {bar} {text}",
        f"{'':>{gutter}} {bar} {' ' * start}{paint(mark * length, kind)}{' ' + label if label else ''}",
    ]


def _line(span: Span) -> str | None:
    """The line of a file, or the override; None when it cannot be read any more."""
    if span.file.startswith("<override "):
        return _printable(span.file.removeprefix("<override ").removesuffix(">"))
    try:
        status = os.stat(span.file)
        lines = _read(span.file, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return None
    return _printable(lines[span.line - 1]) if span.line <= len(lines) else None


@lru_cache(maxsize=8)
def _read(file: str, changed: int, size: int) -> tuple[str, ...]:
    """The lines of a file, read anew when it has changed."""
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as stream:
        return tuple(LINE_BREAK.split(stream.read(2_000_000)))


def _printable(text: str) -> str:
    """The text in as many columns, with nothing in it that a terminal would obey."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
