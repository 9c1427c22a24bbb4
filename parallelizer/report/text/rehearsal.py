"""A rehearsal as text: one rank's step on a real device beside the dry run's prediction."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TextIO

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.report.rows.rehearsal import UNSEEN, Compared


def write(compared: Sequence[Compared], stream: TextIO) -> None:
    """Print every rank that was rehearsed, and what a rehearsal cannot show."""
    width = show_diagnostics.width_of_terminal()
    for one in compared:
        found = one.rehearsal
        stream.write(f"rank {found.rank:,} of {found.ranks:,}, rehearsed on {found.device}\n")
        for name, text in one.lines:
            line = f"  {name:<13}{text}"
            stream.write(
                textwrap.fill(line, width, subsequent_indent=" " * 15, break_on_hyphens=False) + "\n"
            )
    stream.write(textwrap.fill(UNSEEN, width) + "\n")
    stream.flush()
