"""Diagnostics for people: the line that is wrong with carets under it, then what to do."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from functools import lru_cache
from typing import TextIO

from parallelizer.diagnostics import Diagnostic, Span, counts, in_order

_COLORS = {"error": "31", "warning": "33", "note": "36", "frame": "34", "bold": "1"}


def write(diagnostics: Iterable[Diagnostic], stream: TextIO, *, summary: bool = True) -> None:
    """Print diagnostics in order of position, with colour on a terminal only, and a line that counts them."""
    ordered = in_order(diagnostics)
    color = stream.isatty()
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for diagnostic in ordered:
        stream.write(render(diagnostic, color=color, width=width) + "\n\n")
    if summary and ordered:
        stream.write(counts(ordered) + "\n")
    stream.flush()


def render(diagnostic: Diagnostic, *, color: bool = False, width: int = 100) -> str:
    """One diagnostic as text of several lines."""

    def paint(text: str, kind: str) -> str:
        return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m" if color and text else text

    head = f"{diagnostic.severity}[{diagnostic.code}]"
    lines = textwrap.wrap(f"{head}: {diagnostic.message}", width, subsequent_indent="    ") or [head]
    lines[0] = paint(head, diagnostic.severity) + lines[0][len(head) :]
    frames = [(diagnostic.span, "", diagnostic.severity)] if diagnostic.span else []
    frames += [(r.span, r.label, "frame") for r in diagnostic.related]
    for index, (span, label, kind) in enumerate(frames):
        arrow = "-->" if index == 0 else ":::"
        lines.append(f"  {paint(arrow, 'frame')} {_place(span)}")
        text = _line(span)
        if text is not None:
            lines += _frame(text, span, label, kind, width, paint)
    if diagnostic.help:
        lines += textwrap.wrap(f"help: {diagnostic.help}", width, initial_indent="  = ", subsequent_indent="          ")
    return "\n".join(lines)


def _place(span: Span) -> str:
    return span.file if span.file.startswith("<") else str(span)


def _frame(text: str, span: Span, label: str, kind: str, width: int, paint) -> list[str]:  # type: ignore[no-untyped-def]
    """The source line and its carets; a long line is cut around them."""
    number = "" if span.file.startswith("<") else str(span.line)
    gutter = max(len(number), 2)
    start, length = span.column - 1, max(1, min(span.end_column - span.column, len(text) - span.column + 1))
    room = max(width - gutter - 4, 20)
    if len(text) > room:
        left = max(0, min(start - room // 3, len(text) - room))
        text = ("…" if left else "") + text[left + bool(left) : left + room]
        start -= left
    carets = " " * start + ("^" if kind != "frame" else "-") * max(1, min(length, room - start))
    bar = paint("|", "frame")
    return [
        f"{number:>{gutter}} {bar} {text}",
        f"{'':>{gutter}} {bar} {paint(carets, kind)}{' ' + label if label else ''}",
    ]


def _line(span: Span) -> str | None:
    if span.file.startswith("<override "):
        return span.file[len("<override ") : -1]
    lines = _read(span.file)
    return lines[span.line - 1].rstrip("\r").replace("\t", " ") if span.line <= len(lines) else None


@lru_cache(maxsize=32)
def _read(file: str) -> tuple[str, ...]:
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            return tuple(stream.read(2_000_000).split("\n"))
    except OSError:
        return ()
