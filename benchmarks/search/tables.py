"""The tables of the parts, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.proofs.markdown import around, replace_between, table

MARKER = "search"


@dataclass(frozen=True)
class Table:
    """One part: what it shows in a sentence, its rows, and what was asserted and does not hold."""

    title: str
    said: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    wrong: Sequence[str] = ()

    def markdown(self) -> str:
        """The part of a page."""
        lines = [f"- {one}" for one in self.wrong]
        parts = [f"### {self.title}", self.said, table(self.head, self.rows)]
        return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def write(page: Path, tables: Sequence[Table]) -> None:
    """Put the tables between the markers of a page; other parts stay. Raises ValueError for a page without."""
    before, after = around(page, MARKER)
    text = page.read_text()
    now = text[len(before) : len(text) - len(after)]
    kept = {part.partition("\n")[0].strip(): f"### {part.strip()}" for part in now.split("### ")[1:]}
    kept |= {one.title: one.markdown() for one in tables}
    replace_between(page, MARKER, "\n\n".join(kept.values()))
