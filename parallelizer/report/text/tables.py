"""Tables that fit the width they are given: paths broken at dots, least important columns left out."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallelizer.diagnostics.render import MIN_WIDTH

GAP = 2
"""Blanks between two columns."""

LEAST = {"path": 18, "words": 17}
"""The width below which a column that can be wrapped is not pressed, by the way it wraps."""


@dataclass(frozen=True)
class Column:
    """`wrap` says where texts may be broken; of columns with a `spare` above 0 the highest goes first."""

    name: str
    right: bool = False
    wrap: Literal["path", "words"] | None = None
    spare: int = 0


INDENT = "  "
"""Before the lines of a table, and once more before the second line of a path and those after it."""


class Screen(Console):
    """Rich's console; a reader who has gone is the command's matter, where rich ends the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Called while a BrokenPipeError is handled."""
        raise  # noqa: PLE0704


def console(stream: TextIO, width: int | None = None) -> Console:
    """A console whose colour and width follow the terminal; a file gets plain text of 100 columns, or of COLUMNS.

    Nothing in a text is markup: module paths have brackets, and places in files look like emoji codes.
    """
    return Screen(
        file=stream,
        width=width_of(stream, width),
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


def width_of(stream: TextIO, width: int | None = None) -> int | None:
    """The columns to write: those that are asked for, else the terminal's (None), else COLUMNS, else 100."""
    if width or stream.isatty():
        return width
    columns = os.environ.get("COLUMNS", "")
    return max(MIN_WIDTH, int(columns)) if columns.isdecimal() and int(columns) else 100


def write(screen: Console, title: Text, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and under it, indented, a table; a cell may have several lines."""
    kept, widths = _fit(columns, rows, screen.width - len(INDENT))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for i, width in zip(kept, widths, strict=True):
        column = columns[i]
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True, width=width)
    for row in rows:
        table.add_row(*(_wrapped(row[i], columns[i], width) for i, width in zip(kept, widths, strict=True)))
    # Rich pads the lines of a table to its width, and leaves the blank at which it breaks a line.
    for part, indent in ((title, ""), (table, INDENT)):
        with screen.capture() as captured:
            screen.print(part)
        screen.file.write("".join(f"{indent}{line.rstrip()}\n" for line in captured.get().splitlines()))


def wrap_path(path: str, width: int) -> list[str]:
    """A path or glob in lines of at most `width`: broken before dots, else after commas, else anywhere."""
    lines = [""]
    for segment in _SEGMENT.findall(path):
        whole = len(segment) <= width - len(INDENT)
        for piece in [segment] if whole else re.findall(r"[^,]+,?|,", segment):
            if len(lines[-1]) + len(piece) > width and lines[-1].strip():
                lines.append(INDENT)
            while len(lines[-1]) + len(piece) > width > len(INDENT):
                room = width - len(lines[-1])
                lines[-1], piece = lines[-1] + piece[:room], piece[room:]
                lines.append(INDENT)
            lines[-1] += piece
    return lines


_SEGMENT = re.compile(r"\.?(?:\{(?:[^{}]|\{[^{}]*\})*\}|[^.{])+|.")
"""A part of a path with the dot before it; the dots inside braces part nothing."""


def _fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """The columns to show and how wide each is."""
    natural = [
        max(map(len, "\n".join([c.name, *(row[i] for row in rows)]).split("\n")))
        for i, c in enumerate(columns)
    ]
    least = [min(n, LEAST[c.wrap]) if c.wrap else n for n, c in zip(natural, columns, strict=True)]
    kept = [i for i in range(len(columns)) if not rows or any(row[i] for row in rows)]
    while sum(least[i] + GAP for i in kept) - GAP > width and any(columns[i].spare for i in kept):
        kept.remove(max(kept, key=lambda i: columns[i].spare))
    widths = {i: least[i] for i in kept}
    left = max(0, width - sum(least[i] + GAP for i in kept) + GAP)
    for i in sorted(kept, key=lambda i: columns[i].wrap or "~"):  # paths first
        more = min(left, natural[i] - widths[i])
        widths[i] += more
        left -= more
    return kept, list(widths.values())


def _wrapped(cell: str, column: Column, width: int) -> str:
    if column.wrap == "path":
        return "\n".join(line for text in cell.split("\n") for line in wrap_path(text, width))
    if column.wrap == "words":
        return "\n".join(line for text in cell.split("\n") for line in textwrap.wrap(text, width) or [""])
    return cell
