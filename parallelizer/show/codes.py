"""`explain CODE`: what a code means, with its example as it is really refused; and the list of all codes."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from parallelizer.codes import CODES, FAMILIES, Code
from parallelizer.codes.example import found, shipped
from parallelizer.diagnostics import Diagnostic, quoted
from parallelizer.show.diagnostics import MAX_WIDTH, MIN_WIDTH, render
from parallelizer.suggest import nearest

MAX_LINES = 24
"""So many lines of an example's file are shown."""


def is_code(word: str) -> bool:
    """Whether a word is a code, and not the path of a module."""
    return word in CODES


def nearest_codes(word: str) -> list[str]:
    """Codes that a word may be a misspelling of, or that begin with it or have it as a part."""
    return nearest(word, CODES) or [name for name in CODES if word and word in name.split("-")][:3]


def unknown(word: str) -> Diagnostic:
    """The finding about a word that is neither a code nor anything else that can be explained."""
    near = nearest_codes(word)
    help_text = (
        f"did you mean {' or '.join(near)}?" if near else "`python -m parallelizer explain` lists all codes"
    )
    return Diagnostic("unknown-code", f"there is no code {quoted(word)}", None, help_text)


def document(name: str | None) -> dict[str, Any]:
    """What `explain --json` prints: one code with its example, or all of them."""
    names = list(CODES) if name is None else [name]
    return {
        "codes": [
            _as_json(CODES[name], family.name)
            for family in FAMILIES
            for name in names
            if CODES[name] in family.codes
        ]
    }


def _as_json(code: Code, family: str) -> dict[str, Any]:
    example = code.example
    return {
        "code": code.name,
        "family": family,
        "severity": code.severity,
        "summary": code.summary,
        "why": code.paragraph,
        "example": {"files": example.laid_out, "command": example.shown_command},
    }


def explain_code(name: str, stream: TextIO, width: int | None = None) -> None:
    """Print a registered code: the paragraph, the example, and what is really found in it.

    Changes the working directory of this process for a moment.
    """
    code, width = CODES[name], width or terminal_width()
    stream.write(_heading(code) + "\n\n")
    stream.write(textwrap.fill(code.paragraph, width) + "\n\n")
    for line in example_lines(code, width):
        stream.write(line + "\n")


def list_codes(stream: TextIO, width: int | None = None) -> None:
    """Print every code in one line, by family."""
    width = width or terminal_width()
    longest = max(map(len, CODES))
    for family in FAMILIES:
        if not family.codes:
            continue
        stream.write(f"{family.name}: {family.about}\n")
        for code in family.codes:
            line = f"  {code.name:<{longest}}  {code.summary}"
            stream.write((line if len(line) <= width else f"{line[: width - 3]}...") + "\n")
        stream.write("\n")
    stream.write("python -m parallelizer explain CODE says more\n")


def example_lines(code: Code, width: int, color: bool = False) -> list[str]:
    """An example as text: its files, the command, and the findings of the code in it."""
    example = code.example
    if not example.runs:
        return [f"No file triggers it: {example.because}.", f"    $ {example.shown_command}"]
    lines = []
    for path, text in example.laid_out.items():
        lines += [f"    # {path}", *(f"    {line}".rstrip() for line in shortened_lines(text)), ""]
    lines += [f"    $ {example.shown_command}", *rendered(code, width, color)]
    return lines


def rendered(code: Code, width: int, color: bool = False) -> list[str]:
    """The findings of the code in its example, as a command prints them."""
    with found(code.example) as diagnostics:
        return own_lines(code, diagnostics, width, color)


def own_lines(code: Code, diagnostics: Sequence[Diagnostic], width: int, color: bool = False) -> list[str]:
    """Those of some findings that carry the code, as text; the example's files must still lie where they did."""
    own = [d for d in diagnostics if d.code == code.name]
    return "\n\n".join(shipped(render(d, color=color, width=width)) for d in own).split("\n")


def shortened_lines(text: str) -> Sequence[str]:
    """The lines of a file, the middle left out where there are many."""
    lines = [line if len(line) <= MAX_WIDTH else f"{line[:60]} ..." for line in text.rstrip("\n").split("\n")]
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[:3], f"# ... {len(lines) - 4:,} lines more ...", lines[-1]]


def terminal_width() -> int:
    """The columns that diagnostics are wrapped to."""
    return max(MIN_WIDTH, min(shutil.get_terminal_size((100, 24)).columns, MAX_WIDTH))


def _heading(code: Code) -> str:
    return f"{code.severity}[{code.name}]: {code.summary}"
