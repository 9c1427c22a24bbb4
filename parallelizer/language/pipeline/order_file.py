"""An order from a CSV file, in the format that PyTorch's pipeline schedules write and read: a row for each rank, and in each
cell an action or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import LINE_BREAK, Diagnostic, PlanError, Related, Span
from parallelizer.language.pipeline.actions import Action, Order, parse_actions
from parallelizer.language.pipeline.order_mistakes import order_mistakes
from parallelizer.language.pipeline.replay import StuckOrder, replay
from parallelizer.language.yaml_nodes import read_text

MAX_FILE_BYTES = 4_000_000
"""The largest file: an order of 64 ranks and 512 microbatches has 1.5 MB."""

MOST = 5
"""So many mistakes of one file are reported, and so many ranks that wait for one another."""


@dataclass(frozen=True)
class _Cell:
    text: str
    span: Span


def read_order(path: str, shown: str) -> Order:
    """The order in a file; `shown` is its name in diagnostics.

    Raises PlanError with a diagnostic for each cell that is no action, for each stage whose actions are not one forward
    and one backward of each microbatch, or for ranks that wait for one another without end.
    """
    rows = _cells(read_text(path, shown, MAX_FILE_BYTES), shown)
    found: list[Diagnostic] = []
    places: dict[Action, Span] = {}
    order: list[tuple[Action, ...]] = []
    for row in rows:
        actions: list[Action] = []
        for cell in row:
            try:
                parsed = parse_actions(cell.text)
            except ValueError as error:
                found.append(_not_an_action(str(error), cell.span))
                continue
            actions += parsed
            places.update((action, cell.span) for action in parsed)
        order.append(tuple(actions))
    if found:
        raise PlanError(found[:MOST])
    return _checked(tuple(order), places, shown)


def _cells(text: str, shown: str) -> list[list[_Cell]]:
    rows = []
    for number, line in enumerate(LINE_BREAK.split(text.rstrip()), start=1):
        cells, column = [], 1
        for written in line.split(","):
            start = column + len(written) - len(written.lstrip())
            stripped = written.strip()
            cells.append(_Cell(stripped, Span(shown, number, start, start + max(len(stripped), 1))))
            column += len(written) + 1
        rows.append(cells)
    return rows


def _not_an_action(message: str, span: Span) -> Diagnostic:
    help_text = "write stage, kind (F, B, I or W) and microbatch, as in 0F3; an empty cell waits"
    return Diagnostic("schedule-file", message, span, help_text)


def _checked(order: Order, places: dict[Action, Span], shown: str) -> Order:
    """The order, if it is complete and never stuck. Raises PlanError."""

    def place(rank: int, action: Action | None) -> Span:
        return places[action] if action in places else Span(shown, rank + 1, 1, 2)

    wrong = order_mistakes(order)
    if wrong:
        raise PlanError(
            Diagnostic("schedule-incomplete", one.message, place(one.rank, one.action), one.help)
            for one in wrong[:MOST]
        )
    try:
        replay(order)
    except StuckOrder as stuck:
        first, *others = stuck.circle[:MOST]
        related = [Related(places[wait.action], f"{wait}") for wait in others]
        help_text = f"move {first.needed} or {first.action}: an action comes after those that it needs"
        message = f"the ranks wait for one another without end: {first}"
        raise PlanError(
            [Diagnostic("schedule-stuck", message, places[first.action], help_text, related=tuple(related))]
        ) from None
    return order
