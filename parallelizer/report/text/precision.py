"""The linears in float8 as text, and what float8 costs and saves in a step."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TextIO

from rich.text import Text

from parallelizer.diagnostics.units import size
from parallelizer.report.rows.precision import Precision
from parallelizer.report.rows.time import duration
from parallelizer.report.text.tables import Screen, width_of
from parallelizer.simulate.time.predict import StepTime


def write(
    found: Precision | None,
    stream: TextIO,
    time: StepTime | None = None,
    full: StepTime | None = None,
    *,
    width: int | None = None,
) -> None:
    """Print what is in which precision; nothing for a plan without float8. `full` is the time of a step without float8."""
    if found is None:
        return
    screen = Screen(file=stream, width=width_of(stream, width), highlight=False)
    screen.print(Text.assemble(("precision", "bold"), f"  {counted(found.number, found.experts)} in float8"))
    for head, text in (*_lines(found), *_gain(time, full)):
        first = f"  {head:<12}"
        for line in textwrap.wrap(
            text, screen.width, initial_indent=first, subsequent_indent=" " * len(first)
        ):
            screen.print(Text(line))
    screen.print()


def counted(modules: int, experts: int) -> str:
    """`8 linears and the experts of 2 modules`, of so many modules, among which so many hold stacked experts."""
    parts = (
        [f"{modules - experts} linear{'' if modules - experts == 1 else 's'}"] if modules > experts else []
    )
    parts += [f"the experts of {experts} module{'' if experts == 1 else 's'}"] if experts else []
    return " and ".join(parts)


def _lines(found: Precision) -> Iterator[tuple[str, str]]:
    for recipe, modules in found.linears.items():
        yield recipe, ", ".join(modules)
    yield (
        "not",
        f"{', '.join(found.full)}, and all that is no linear" if found.full else "all that is no linear",
    )
    if found.casts is not None and found.products is not None:
        by = f"{found.products:,} products by kernels" if found.products else "products emulated, in float32"
        yield "a step", f"{by}, {found.casts:,} casts"
    if found.reductions:
        agreed = f"{found.reductions:,} all-reduces of largest values, {size(found.reduced_bytes)}"
        yield "scales", agreed
    if found.gathers:
        yield "fsdp", f"gathers {size(found.gathered)} of {size(found.gathers)} in float8"
    if found.inputs_gathered:
        yield "tp", f"gathers {size(found.inputs_gathered)} of {size(found.inputs_gathers)} in float8"
    if found.kept:
        beside = f", {size(found.kept_without)} without float8" if found.kept_without is not None else ""
        yield "activations", f"{size(found.kept)} at most{beside}"


def _gain(time: StepTime | None, full: StepTime | None) -> Iterator[tuple[str, str]]:
    if time is not None and full is not None:
        gain = f"{full.seconds / time.seconds:.2f} times the speed"
        yield "time", f"{duration(time.seconds)} a step, {duration(full.seconds)} without float8: {gain}"
