"""A pipeline schedule in the terminal: a row for each rank and a cell for each slot of time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from parallelizer.language.pipeline.actions import BACKWARD, ActionKind, Order
from parallelizer.language.pipeline.replay import replay
from parallelizer.report.rows.schedules import ScheduleRow
from parallelizer.report.text import tables
from parallelizer.report.text.tables import Column

BANDS = 3
"""The most parts of a step that are shown below each other; of a longer step, the middle is left out."""

RANKS = 16
"""The most ranks that are shown; of more, those in the middle are left out."""

COLOURS = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}

LEGEND = (
    "0F3 is the forward of stage 0 for microbatch 3; B its backward, I and W the two halves of one; . waits"
)


def write(order: Order, screen: Console) -> None:
    """Print the order as if F, I and W took one slot each and B two, folded to the width of the screen."""
    for line in picture(order, screen.width):
        screen.print(line, soft_wrap=True)
    for words in textwrap.wrap(LEGEND, screen.width):
        screen.print(Text(words, style="dim"))


def picture(order: Order, width: int) -> Iterator[Text]:
    """The lines of the picture, none wider than `width` unless a single cell is."""
    grid = _grid(order)
    cell = 1 + max((len(str(action)) for actions in order for action in actions), default=0)
    label = len(f"rank {len(order) - 1}") + 2
    slots = max(map(len, grid))
    room = max(1, (width - label + 1) // cell)
    parts = [range(start, min(start + room, slots)) for start in range(0, slots, room)]
    shown = parts if len(parts) <= BANDS else [*parts[: BANDS - 1], range(slots - room, slots)]
    for number, part in enumerate(shown):
        if number and part.start > shown[number - 1].stop:
            yield Text(f"slots {shown[number - 1].stop + 1} to {part.start} are left out", style="dim")
        if len(parts) > 1:
            yield Text(f"slots {part.start + 1} to {part.stop} of {slots}", style="dim")
        yield from _band(grid, part, cell, label)


def _grid(order: Order) -> list[list[tuple[str, ActionKind | None]]]:
    """For each rank the text and the kind of each slot. The second slot of a whole backward is a dash."""
    timed = replay(order)
    grid: list[list[tuple[str, ActionKind | None]]] = [[(".", None)] * round(timed.length) for _ in order]
    for row, actions in zip(grid, timed.ranks, strict=True):
        for one in actions:
            row[round(one.start)] = (str(one.action), one.action.kind)
            if one.action.kind is BACKWARD:
                row[round(one.start) + 1] = ("-" * len(str(one.action)), one.action.kind)
    return grid


def _band(
    grid: Sequence[Sequence[tuple[str, ActionKind | None]]], part: range, cell: int, label: int
) -> Iterator[Text]:
    hidden = range(RANKS // 2, len(grid) - RANKS // 2) if len(grid) > RANKS else range(0)
    for rank, row in enumerate(grid):
        if rank in hidden:
            if rank == hidden.start:
                yield Text(f"ranks {hidden.start} to {hidden.stop - 1} are left out", style="dim")
            continue
        line = Text(f"rank {rank}".ljust(label), end="")
        for slot in part:
            text, kind = row[slot]
            line.append(text.ljust(cell), COLOURS[kind] if kind else "dim")
        line.rstrip()
        yield line


def write_table(rows: Sequence[ScheduleRow], screen: Console, ranks: int, microbatches: int) -> None:
    """Print the schedules side by side, and below them why the others cannot run."""
    title = Text.assemble(("schedules", "bold"), f"  on {ranks} ranks with {microbatches} microbatches")
    columns = [
        Column("schedule"),
        Column("stages a rank", right=True, spare=1),
        Column("bubble", right=True),
        Column("live microbatches", right=True),
    ]
    tables.write(screen, title, columns, [cells(row) for row in rows if row.misfit is None])
    for row in rows:
        for words in textwrap.wrap(row.misfit or "", screen.width - len(tables.INDENT)):
            screen.print(Text(f"{tables.INDENT}{words}", style="dim"))


def cells(row: ScheduleRow) -> list[str]:
    """The cells of a schedule that can run, as text and page show them."""
    return [row.name, str(row.stages_per_rank), f"{100 * (row.bubble or 0):.1f}%", f"{row.live or 0:.3g}"]
