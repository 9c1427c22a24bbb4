"""The dry run as text: what is sent in one step, over which axis and how often, and what is held when memory
is fullest."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallelizer.diagnostics.units import size
from parallelizer.report.capacity import KERNELS_NOT_COUNTED, NOT_COUNTED, VERDICTS, capacity
from parallelizer.report.rows.collectives import collective_rows
from parallelizer.report.rows.memory import memory_rows
from parallelizer.report.text import classes
from parallelizer.report.text.tables import Screen, width_of
from parallelizer.simulate.record.trace import Trace

MESH = (
    "The collectives are those of a CPU mesh. On CUDA, DTensor moves a shard from one dimension to another by an all-to-all, "
    "where on CPU it gathers the whole."
)
NARROW = 72
"""Columns below which the table leaves the payload out."""


def write(
    trace: Trace,
    stream: TextIO,
    *,
    device: str,
    hardware: Mapping[str, Any] | None = None,
    width: int | None = None,
    dtype: str | None = None,
) -> None:
    """Print the collectives and the memory of one rank's step. `device` is what the run will be on, and `dtype` that of the
    model's parameters: what is sent in another one is named.

    Colour and width follow the terminal; a file gets plain text of 100 columns, or of COLUMNS.
    """
    console = Screen(file=stream, width=width_of(stream, width), highlight=False)
    _collectives(trace, dtype, console)
    _memory(trace, device, hardware or {}, console)
    classes.write(trace.classes, console)


def _collectives(trace: Trace, dtype: str | None, console: Console) -> None:
    if not trace.ledger:
        console.print(Text.assemble(("collectives", "bold"), " of one step: none\n"))
        return
    console.print(Text.assemble(("collectives", "bold"), f" of one step, as rank {trace.rank} sees them"))
    narrow = console.width < NARROW
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("  phase", "axis", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("calls", "payload", "sent"):
        if not (narrow and name == "payload"):
            table.add_column(name, justify="right", no_wrap=True)
    rows, last = collective_rows(trace.ledger), ""
    others = [
        ", ".join(row.dtypes) if dtype and row.dtypes.keys() - {dtype} and not narrow else "" for row in rows
    ]
    if any(others):
        table.add_column("dtype")
    for row, other in zip(rows, others, strict=True):
        phase, last = "" if row.phase == last else row.phase, row.phase
        payload = [] if narrow else [size(row.payload_bytes)]
        table.add_row(
            f"  {phase}",
            row.axis,
            row.kind,
            f"{row.count:,}",
            *payload,
            size(row.wire_bytes),
            *([other] if any(others) else []),
        )
    console.print(table)
    sent, ahead = sum(row.wire_bytes for row in rows), sum(row.ahead for row in rows)
    sent_ahead = sum(row.ahead_bytes for row in rows)
    issued = f"FSDP issues {ahead:,} of them, {size(sent_ahead)}, beside the computation"
    waited = f"{issued}; {size(sent - sent_ahead)} are waited for." if ahead else "Each is waited for."
    _say(console, f"{_calls(len(trace.ledger))}, this rank sends {size(sent)}. {waited}")
    _say(console, MESH)
    console.print()


def _calls(number: int) -> str:
    return f"{number:,} call{'' if number == 1 else 's'}"


def _memory(trace: Trace, device: str, hardware: Mapping[str, Any], console: Console) -> None:
    memory = trace.memory
    where = f"in {memory.phase}" if memory.phase else "between steps"
    head = Text.assemble(("memory", "bold"), f" of rank {trace.rank}: peak ", (size(memory.peak), "bold"))
    place = f"{where}, {memory.module}" if memory.module else where
    together = len(head) + len(place) + 2 <= console.width
    console.print(head + Text(f"{', ' if together else chr(10) + '  '}{place}"))
    block = "█" if console.encoding.startswith("utf") else "#"
    room = max(console.width - 38, 8)
    for row in sorted(memory_rows(memory, memory.at_peak), key=lambda row: -row.held):
        if row.held:
            share = row.held / memory.peak
            bar = block * max(1, round(room * share))
            console.print(
                Text.assemble(f"  {row.kind:<12}{size(row.held):>11} {share:>6.1%}  ", (bar, "cyan"))
            )
    _fits(trace, hardware, console)
    if device != "cpu" or hardware.get("memory_gib"):
        _say(console, NOT_COUNTED)
    if trace.uncounted:
        _say(console, f"{KERNELS_NOT_COUNTED} {', '.join(sorted(trace.uncounted))}.")
    console.print()


def _fits(trace: Trace, hardware: Mapping[str, Any], console: Console) -> None:
    found = capacity(trace, hardware)
    if found is None:
        return
    style = dict(zip(VERDICTS, ("green", "yellow", "bold red"), strict=True))[found.verdict]
    said = f"  {found.device}, {size(found.total)}: "
    console.print(Text.assemble(said, (found.verdict, style), f", {found.rest}"))


def _say(console: Console, text: str) -> None:
    """A remark under a table, indented on every line."""
    for line in textwrap.wrap(text, console.width - 2):
        console.print(Text(f"  {line}", "dim"))
