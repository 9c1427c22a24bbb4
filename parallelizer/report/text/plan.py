"""The plan as tables: mesh, what a rank holds of which parameter, what is done to which module, buffers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from parallelizer.compiler.parameter_shards import ParameterShard
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.units import size
from parallelizer.language.plan import AXIS_MEANINGS
from parallelizer.report.rows.buffers import BufferRow, buffer_rows, dealt_out
from parallelizer.report.rows.mesh_axes import AxisRow, axis_rows
from parallelizer.report.rows.modules import ModuleRow, module_rows
from parallelizer.report.rows.parameters import (
    ParameterRow,
    ParameterTotal,
    parameter_rows,
    parameter_total,
    shape,
    sharding_axes,
)
from parallelizer.report.text import tables
from parallelizer.report.text.tables import Column
from parallelizer.styles.application import Program


def write(
    program: Program,
    shards: Sequence[ParameterShard],
    stream: TextIO,
    *,
    rank: int = 0,
    width: int | None = None,
) -> None:
    """Print the plan of a program, as `rank` sees it, of which `shards` are the parameters."""
    axes, parameters = sharding_axes(shards), parameter_rows(shards, apart=lambda shard: shard.styles)
    total = parameter_total(shards, program)
    modules = module_rows(program, _place)
    meshes = axis_rows(program.mesh)
    buffers = buffer_rows(program)
    order = dealt_out(program) if buffers else ""

    screen = tables.console(stream, width)
    _mesh(program, meshes, screen)
    _parameters(axes, parameters, total, rank, screen)
    _modules(modules, screen)
    _buffers(buffers, order, program.mesh.sizes["cp"], screen)


def _mesh(program: Program, rows: Sequence[AxisRow], screen: Console) -> None:
    mesh = program.mesh
    screen.print(
        Text.assemble(("plan", "bold"), f"  {program.plan.name}, {program.plan.file}"), soft_wrap=True
    )
    ranks = f"{mesh.world_size:,} ranks: {mesh}" if mesh.world_size > 1 else "1 rank"
    screen.print(Text.assemble(("mesh", "bold"), f"  {ranks}"))
    for row in rows:
        if row.is_folded:
            folded = f"fsdp shards over {' and '.join(row.axes)} folded: {row.size:,} ranks"
            _hanging("  ", folded, screen)
        else:
            near = "neighbouring ranks" if row.stride == 1 else f"ranks {row.stride:,} apart"
            _hanging(f"  {row.name:<13}{row.size:>5,}  ", f"{AXIS_MEANINGS[row.name]}, {near}", screen)
    screen.print()


def _hanging(head: str, text: str, screen: Console) -> None:
    """A head, and a text that stays to its right when it is wrapped."""
    for line in textwrap.wrap(text, max(20, screen.width - len(head))):
        screen.print(head + line)
        head = " " * len(head)


def _parameters(
    axes: Sequence[str], found: Sequence[ParameterRow], total: ParameterTotal, rank: int, screen: Console
) -> None:
    columns = [
        Column("parameter", wrap="path"),
        Column("n", right=True),
        Column("style", spare=2),
        *(Column(axis.replace("+", "\n+")) for axis in axes),
        Column("global", spare=1),
        Column("local"),
        Column("bytes", right=True),
    ]
    rows = [
        [
            "\n".join(row.paths),
            f"{len(row.names):,}",
            _styles(row.shard),
            *(_short(row.shard.placements.get(axis, "replicate")) for axis in axes),
            shape(row.shard.global_shape),
            shape(row.shard.local_shape),
            size(row.bytes),
        ]
        for row in found
    ]
    under = "; under an axis stands the dimension that is sharded over it" if axes else ""
    tables.write(screen, Text.assemble(("parameters", "bold"), f" of rank {rank}{under}"), columns, rows)
    held = f"{total.held:,} of them, {size(total.bytes)}"
    _hanging("  ", f"{total.whole:,} parameters; this rank holds {held}", screen)
    screen.print()


def _styles(shard: ParameterShard) -> str:
    """The style that placed it; fsdp alone where no other did, and why fsdp leaves it whole."""
    names = [s for s in shard.styles if s != "fsdp"] or list(shard.styles) or ["-"]
    return "\n".join(names) + (f"\n({shard.reason})" if shard.reason else "")


def _modules(found: Sequence[ModuleRow], screen: Console) -> None:
    """Styles that do not show in the parameters' table."""
    if not found:
        return
    columns = [
        Column("module", wrap="path"),
        Column("style"),
        Column("axis", spare=1),
        Column("layouts", wrap="words"),
        Column("rule", spare=2),
    ]
    rows = [["\n".join(row.paths), row.style, row.axis, _flows(row), _place(row.span)] for row in found]
    tables.write(screen, Text("modules", "bold"), columns, rows)
    screen.print()


def _flows(row: ModuleRow) -> str:
    """What is done to inputs and outputs, a line each."""
    return "\n".join(f"{option} {flow}" for option, flows in row.flows for flow in flows)


def _place(span: Span) -> str:
    return "command line" if span.file.startswith("<override") else f"{Path(span.file).name}:{span.line}"


def _buffers(rows: Sequence[BufferRow], order: str, cp: int, screen: Console) -> None:
    if not rows:
        return
    screen.print(Text.assemble(("buffers", "bold"), f"  split over cp={cp}"))
    _hanging("  order  ", order, screen)
    for owner in ("batch", "model"):
        if split := [f"{row.name} ({row.split})" for row in rows if row.owner == owner]:
            _hanging(f"  {owner}  ", ", ".join(split), screen)
    screen.print()


def _short(placement: str) -> str:
    """`-`, or the number of the sharded dimension."""
    return "-" if placement == "replicate" else placement.removeprefix("shard(").removesuffix(")")
