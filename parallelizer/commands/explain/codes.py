"""`explain CODE`: what a code means, with an example and how it is refused; and the list of all codes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, TextIO

from parallelizer.diagnostics.codes.all_codes import CODES, FAMILIES
from parallelizer.diagnostics.codes.section import REASON, Code, Example
from parallelizer.diagnostics.diagnostic import Diagnostic, quoted
from parallelizer.diagnostics.nearest import nearest
from parallelizer.diagnostics.render import width_of_terminal


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
    return {"codes": [_as_json(code) for code in (CODES.values() if name is None else [CODES[name]])]}


def _as_json(code: Code) -> dict[str, Any]:
    example = code.example
    return {
        "code": code.name,
        "family": code.family,
        "severity": code.severity,
        "summary": code.summary,
        "why": " ".join(code.why),
        "fix": code.fix,
        "example": {"files": example.written_out, "command": example.command, "output": example.output},
    }


def explain_code(name: str, stream: TextIO, width: int | None = None) -> None:
    """Print the text of a code: what is wrong and why, the example, and what to do."""
    code, width = CODES[name], width or width_of_terminal()
    stream.write(f"{code.severity}[{code.name}]: {code.summary}\n\n")
    for paragraph in code.why:
        stream.write(textwrap.fill(paragraph, width) + "\n\n")
    for line in _example_lines(code.example, width):
        stream.write(line + "\n")
    stream.write("\n" + textwrap.fill(f"Fix: {code.fix}", width) + "\n")


def list_codes(stream: TextIO, width: int | None = None) -> None:
    """Print every code in one line, by family."""
    width = width or width_of_terminal()
    longest = max(map(len, CODES))
    for family in FAMILIES:
        stream.write(f"{family.name}: {family.about}\n")
        for code in family.codes:
            line = f"  {code.name:<{longest}}  {code.summary}"
            stream.write((line if len(line) <= width else f"{line[: width - 3]}...") + "\n")
        stream.write("\n")
    stream.write("python -m parallelizer explain CODE says more\n")


def _example_lines(example: Example, width: int) -> Iterator[str]:
    if not example.runs:
        yield textwrap.fill(f"{REASON}{example.because}.", width)
    for path, text in example.files.items():
        yield f"    # {path}"
        yield from (f"    {line}".rstrip() for line in text.splitlines())
        yield ""
    yield f"    $ {example.command}"
    yield from example.output.splitlines()
