"""The results of a search as text and as a document."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from rich.text import Text

from parallelizer.diagnostics.units import size
from parallelizer.propose.search import reasons
from parallelizer.propose.search.aims import COST, TIME, Tried
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.preset import run_overrides
from parallelizer.propose.search.task import SearchTask
from parallelizer.propose.search.truth import TracedWhole
from parallelizer.report.rows.time import duration, range_of
from parallelizer.report.text.tables import Column, console, write

COLUMNS = (
    Column(""),
    Column("step", right=True),
    Column("range", spare=2),
    Column("MFU", right=True, spare=1),
    Column("peak", right=True),
    Column("mesh", wrap="words"),
    Column("options", wrap="words"),
    Column("loses", wrap="words", spare=3),
)


TRIED = (
    Column("hardware"),
    Column("GPUs", right=True),
    Column("step", right=True),
    Column("1,000 steps cost", right=True),
    Column("mesh", wrap="words"),
)
COST_COLUMN = 3

NO_BREAK = "\xa0"
"""A blank at which lines do not end."""


def write_tried(tried: Sequence[Tried], aim: str, stream: TextIO, *, width: int | None = None) -> None:
    """Print the numbers and kinds of GPUs that were compared, if there were several."""
    if aim == TIME:
        return
    screen = console(stream, width)
    rows = []
    for one in tried:
        best = one.found.results[0] if one.found.results else None
        rows.append(
            [
                one.task.machine.name,
                f"{one.task.gpus:,}",
                duration(best.seconds) if best else "",
                _amount(1000 * one.cost) if best and aim == COST else "",
                best.candidate.words() if best else "nothing fits or divides",
            ]
        )
    columns = [column for at, column in enumerate(TRIED) if aim == COST or at != COST_COLUMN]
    kept = [[cell for at, cell in enumerate(row) if aim == COST or at != COST_COLUMN] for row in rows]
    write(screen, Text(f"searched for {aim}", "bold"), columns, kept)
    screen.print()


def write_found(
    found: SearchResult, task: SearchTask, stream: TextIO, *, top: int, width: int | None = None
) -> None:
    """Print the best candidates, what binds, what does not fit, and what was left out."""
    screen = console(stream, width)
    workload = task.base.workload
    said = (
        f"search   {task.gpus:,} x {task.machine.name}, {workload.batch_size:,} sequences of {workload.seq_len:,} a step, "
        f"at most {_memory(task)}"
    )
    _print(screen, said, bold=len("search"))
    _print(screen, f"  {reasons.counts(found)}")
    if not found.complete and found.results:
        screen.print("  interrupted: these are the best so far")
    screen.print()
    if found.results:
        best = found.results[0]
        rows = [
            [
                str(at + 1),
                duration(one.seconds),
                range_of(one.time),
                "" if one.time.mfu is None else f"{one.time.mfu:.0%}",
                size(one.peak),
                one.candidate.words(),
                one.candidate.options(),
                "" if one is best else reasons.loses(best, one),
            ]
            for at, one in enumerate(found.results[:top])
        ]
        write(screen, Text("best", "bold"), COLUMNS, rows)
        if found.cut_short and len(rows) < top:
            _print(
                screen,
                f"  fewer than {top}, because dry runs of this model take long: `--top {top}` makes as many",
            )
        screen.print()
        _list(screen, "what binds", reasons.binds(found, task))
    _list(screen, "does not fit", [reasons.too_large(one, task) for one in found.too_large[:3]])
    _list(
        screen,
        "refused by the dry run",
        [f"{one.candidate.words()}: {one.reason}" for one in found.failed[:3]],
    )
    _list(screen, "left out", reasons.left_out(found))


def _list(screen: Any, title: str, lines: list[str]) -> None:
    if not lines:
        return
    screen.print(Text(title, "bold"))
    for line in lines:
        _print(screen, f"  {line}")
    screen.print()


def _print(screen: Any, line: str, bold: int = 0) -> None:
    """Print a line, wrapped with an indent. No number is parted from its unit. The first `bold` characters are bold."""
    joined = re.sub(r"(?<=\d) (?=\S)", NO_BREAK, line)
    parts = textwrap.wrap(
        joined, screen.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    text = Text("\n".join(parts).replace(NO_BREAK, " "))
    text.stylize("bold", 0, bold)
    screen.print(text)


def _memory(task: SearchTask) -> str:
    """The memory that a step may use on a device, and that of the device where it is less."""
    has = float(task.base.hardware.get("memory_gib") or 0) * 2**30
    more = f", which has {size(has)}" if 0 < has < task.memory else ""
    return f"{size(task.memory)} on a device{more}"


def _amount(money: float) -> str:
    """An amount with at least three digits that count."""
    digits = 2 if money <= 0 else max(2, 2 - math.floor(math.log10(money)))
    return f"{money:,.{digits}f}"


def document(
    found: SearchResult, task: SearchTask, texts: list[str], tried: Sequence[Tried] = (), aim: str = TIME
) -> dict[str, Any]:
    """What `search --json` prints: sizes in bytes, times in seconds. `texts` are the presets of the first results, `tried` all
    searches that were compared.
    """
    return {
        "for": aim,
        "tried": [
            {
                "gpus": one.task.gpus,
                "hardware": one.task.machine.name,
                "seconds": one.found.results[0].seconds if one.found.results else None,
                "cost": one.cost if one.found.results and aim == COST else None,
            }
            for one in tried
        ],
        "gpus": task.gpus,
        "hardware": task.machine.name,
        "memory": task.memory,
        "complete": found.complete,
        "candidates": found.total,
        "excluded": dict(sorted(found.excluded.items())),
        "pruned": {reason: count for reason, count in sorted(found.pruned.items()) if count},
        "classes": found.classes,
        "priced": len(found.priced),
        "binds": reasons.binds(found, task) if found.results else [],
        "results": [
            {
                **_one(one),
                "loses": reasons.loses(found.results[0], one),
                "preset": text,
                "overrides": run_overrides(one.candidate),
            }
            for one, text in zip(found.results, texts, strict=False)
        ],
        "too_large": [{**_one(one), "excess": one.peak - task.memory} for one in found.too_large],
        "refused": [{"mesh": one.candidate.mesh.every, "reason": one.reason} for one in found.failed],
    }


def _one(one: TracedWhole) -> dict[str, Any]:
    time = one.time
    return {
        "mesh": one.candidate.mesh.every,
        "options": one.candidate.options(),
        "seconds": time.seconds,
        "low": time.low,
        "high": time.high,
        "mfu": time.mfu,
        "tokens_per_second": time.tokens_per_second,
        "peak": one.peak,
        "at_peak": dict(one.at_peak),
    }
