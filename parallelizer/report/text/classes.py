"""The classes of ranks as a table: whose figures the others have too, and who needs more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from parallelizer.diagnostics.units import size
from parallelizer.report.rows.rank_classes import rank_class_rows
from parallelizer.report.text import tables
from parallelizer.report.text.tables import Column
from parallelizer.simulate.record.rank_classes import RankClass

MANY = 8
"""Rows from which the table says in one how many more there are."""


def write(classes: Iterable[RankClass], screen: Console) -> None:
    """Print the classes, those of equal figures in one row; one line where all ranks are alike."""
    classes = list(classes)
    ranks = sum(c.ranks for c in classes)
    if ranks <= 1:
        return
    if len(classes) == 1:
        screen.print(Text.assemble(("ranks", "bold"), f"  all {ranks:,} hold and do the same"))
        screen.print()
        return
    found = rank_class_rows(classes)
    if len(found) == 1:
        among = _listed(found[0].like)
        said = (
            f"  all {ranks:,} need the same; {len(classes):,} kinds compute differently, like ranks {among}"
        )
        screen.print(Text.assemble(("ranks", "bold"), said))
        screen.print()
        return
    rows = [
        [
            _listed(row.like),
            f"{row.ranks:,}",
            size(row.parameters_bytes),
            "not traced" if row.peak is None else size(row.peak),
            "-" if row.sent_bytes is None else size(row.sent_bytes),
        ]
        for row in found
    ]
    rest = len(rows) - MANY
    if rest > 1:
        rows[MANY:] = [[f"({rest} more)", "", "", "", ""]]
    columns = [
        Column("like rank", wrap="words"),
        Column("ranks", right=True),
        Column("parameters", right=True),
        Column("peak", right=True),
        Column("sent", right=True, spare=1),
    ]
    title = Text.assemble(("ranks", "bold"), f"  {len(classes):,} classes, by what they hold and compute")
    tables.write(screen, title, columns, rows)
    if any(c.peak is None for c in classes):
        screen.print(Text("  Those not traced hold no more than one that was.", "dim"))
    screen.print()


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(f"{rank:,}" for rank in ranks[:4]) + (", ..." if len(ranks) > 4 else "")
