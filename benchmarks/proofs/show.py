"""The matrix of proofs: as a page's table, for a terminal, and as JSON."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.proofs.cells import Cell, Row
from benchmarks.proofs.markdown import table


def summary(cells: Sequence[Cell]) -> str:
    """How many cells are proven, how many have to be refused and are, and the worst error."""
    shares = [c.share for c in cells if c.passed and c.share is not None]
    refused = sum(c.passed and c.share is None for c in cells)
    told = f", {refused} {'is' if refused == 1 else 'are'} refused, as {'it has' if refused == 1 else 'they have'} to be"
    worst = f"; the worst error is {max(shares):.2f} of its bound" if shares else ""
    return f"{len(shares)} of {len(cells)} cells are proven{told if refused else ''}{worst}."


def listing(cells: Sequence[Cell], width: int) -> str:
    """The table for a terminal, which has no room for its columns: under each row its presets."""
    by_row: dict[Row, list[Cell]] = {}
    for cell in cells:
        by_row.setdefault(cell.row, []).append(cell)
    lines = []
    for row, of_row in by_row.items():
        figures = ", ".join(f"{c.preset} {in_a_word(c).strip('*')}" for c in of_row)
        lines += [row.name, textwrap.fill(figures, width, initial_indent="  ", subsequent_indent="  ")]
    lines += [textwrap.fill(line, width, subsequent_indent="    ") for line in _wrong(cells)]
    return "\n".join(lines)


def _wrong(cells: Sequence[Cell]) -> list[str]:
    return [f"- {c.row.name} on {c.preset}: {c.reason}" for c in cells if not c.passed]


def markdown(cells: Sequence[Cell], across: Sequence[str]) -> str:
    """The table: in each cell the worst error as a share of its bound."""
    by_row: dict[Row, list[Cell]] = {}
    for cell in cells:
        by_row.setdefault(cell.row, []).append(cell)
    lines = [[row.name, *map(in_a_word, of_row)] for row, of_row in by_row.items()]
    ran = {c.preset: c.ran for c in cells}
    named = "model, plan" if any(row.plan for row in by_row) else "model"
    head = [named, *(f"{p} ({ran[p]})" if ran[p] else p for p in across)]
    return "\n\n".join([table(head, lines), *_wrong(cells)])


def document(cells: Iterable[Cell]) -> dict[str, Any]:
    """What `--json` prints."""
    every = list(cells)
    return {
        "passed": all(c.passed for c in every),
        "cells": [
            {
                "row": c.row.name,
                "model": c.row.model,
                "plan": c.row.plan,
                "preset": c.preset,
                "mesh": c.ran,
                "passed": c.passed,
                "share": c.share if c.share is None or c.share < float("inf") else sys.float_info.max,
                "reason": c.reason,
            }
            for c in every
        ],
    }


def in_a_word(cell: Cell) -> str:
    """A cell's text."""
    if cell.passed and cell.share is not None:
        return f"{cell.share:.2f}"
    return (
        "**not equal**"
        if cell.share is not None
        else "refused"  # also where it has to be, which is a success
        if cell.reason.startswith("refused")
        else "**failed**"
    )
