"""Markdown tables that a command writes into a page, between two comments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, with what would end a cell escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def replace_between(path: str | Path, marker: str, text: str) -> None:
    """Put `text` between `<!-- marker:begin -->` and `<!-- marker:end -->` of a page. Raises ValueError when
    it has no such place, OSError when it cannot be read or written.
    """
    before, after = around(path, marker)
    Path(path).write_text(f"{before}\n{text.strip()}\n{after}")


def around(path: str | Path, marker: str) -> tuple[str, str]:
    """A page up to the beginning of a place, and from its end. Raises as `replace_between`."""
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    before, found, rest = Path(path).read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no place `{begin} ... {end}`")
    return before + begin, end + after
