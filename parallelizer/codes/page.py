"""The documentation page of all codes, made from the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from textwrap import fill

from parallelizer.codes import FAMILIES, Code
from parallelizer.show.codes import rendered, shortened_lines

WIDTH = 100

Result = Callable[[Code], list[str]]

COMMAND = "python -m parallelizer.codes > docs/diagnostics.md"

HEAD = f"""# Diagnostics

Every finding has a code that stays the same across releases. `python -m parallelizer explain CODE` prints what
stands here, `explain` without a code lists them. The examples on this page are run to make it, and what stands
below them is what was found: `{COMMAND}`.

An *error* ends the command with status 1 before any rank starts; a *warning* or a *note* does not.
"""


def page() -> str:
    """The page in Markdown. Runs every example, the traced ones too."""
    return "\n".join([HEAD, *_contents(), *(line for block in blocks() for line in block)]) + "\n"


def blocks(traced: bool = True, result: Result | None = None) -> Iterator[list[str]]:
    """The page's lines, code by code; without `traced`, those of what only a traced step shows are left out.

    `result` gives what was found in a code's example; by default it is run.
    """
    result = result or (lambda code: rendered(code, WIDTH))
    for family in FAMILIES:
        if family.codes:
            yield [f"## {family.name.capitalize()}", "", family.about, ""]
        for code in family.codes:
            if traced or not code.example.traced:
                yield _section(code, result)


def _contents() -> Iterator[str]:
    for family in FAMILIES:
        if family.codes:
            names = ", ".join(f"[`{code.name}`](#{code.name})" for code in family.codes)
            yield f"- **{family.name}**: {names}"
    yield ""


def _section(code: Code, result: Result) -> list[str]:
    lines = [f"### {code.name}", "", f"*{code.severity}*: {code.summary}", "", fill(code.paragraph, 110), ""]
    example = code.example
    if not example.runs:
        return [
            *lines,
            f"No file triggers it: {example.because}.",
            "",
            "```console",
            f"$ {example.shown_command}",
            "```",
            "",
        ]
    for path, text in example.laid_out.items():
        kind = "python" if path.endswith(".py") else "yaml"
        lines += [f"```{kind}", f"# {path}", *shortened_lines(text), "```", ""]
    return [*lines, "```console", f"$ {example.shown_command}", *result(code), "```", ""]
