"""The plan as tables: mesh, what a rank holds of which parameter, what is done to which module, buffers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text
from torch import nn

from parallelizer.compiler.parameter_shards import ParameterShard, parameter_shards
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.units import size
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import AXES, Buffer
from parallelizer.report.text import tables
from parallelizer.report.text.tables import Column
from parallelizer.styles.application import Application, Program
from parallelizer.styles.context_parallel.order import imbalance, static_order

_MEANING = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas of everything",
    "dp_shard": "shards of parameters, gradients and optimizer state",
    "cp": "parts of each sequence",
    "ep": "expert shards",
    "tp": "slices of each layer",
}


def write(
    program: Program, model: nn.Module, stream: TextIO, *, rank: int = 0, width: int | None = None
) -> None:
    """Print the plan of a program, as `rank` sees it, for the model that it was compiled for."""
    screen = tables.console(stream, width)
    _mesh(program, screen)
    _parameters(parameter_shards(program, model, rank), rank, screen)
    _modules(program, screen)
    _buffers(program, screen)


def _mesh(program: Program, screen: Console) -> None:
    mesh = program.mesh
    screen.print(
        Text.assemble(("plan", "bold"), f"  {program.plan.name}, {program.plan.file}"), soft_wrap=True
    )
    ranks = f"{mesh.world_size:,} ranks: {mesh}" if mesh.world_size > 1 else "1 rank"
    screen.print(Text.assemble(("mesh", "bold"), f"  {ranks}"))
    stride = mesh.world_size
    for axis in AXES:
        size = mesh.sizes[axis]
        stride //= size
        if size > 1:
            near = "neighbouring ranks" if stride == 1 else f"ranks {stride:,} apart"
            _hanging(f"  {axis:<13}{size:>5,}  ", f"{_MEANING[axis]}, {near}", screen)
    if len(mesh.fsdp_axes) > 1:
        axes = " and ".join(mesh.fsdp_axes)
        _hanging("  ", f"fsdp shards over {axes} folded: {mesh.size(*mesh.fsdp_axes):,} ranks", screen)
    screen.print()


def _hanging(head: str, text: str, screen: Console) -> None:
    """A head, and a text that stays to its right when it is wrapped."""
    for line in textwrap.wrap(text, max(20, screen.width - len(head))):
        screen.print(head + line)
        head = " " * len(head)


def _parameters(shards: Sequence[ParameterShard], rank: int, screen: Console) -> None:
    every = shards[0].placements if shards else {}
    axes = [axis for axis in every if any(s.placements.get(axis) != "replicate" for s in shards)]
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
            "\n".join(fold_paths(names)),
            f"{len(names):,}",
            _styles(shard),
            *(_short(shard.placements.get(axis, "replicate")) for axis in axes),
            _shape(shard.global_shape),
            _shape(shard.local_shape),
            size(shard.bytes * len(names)),
        ]
        for names, shard in _folded(shards)
    ]
    under = "; under an axis stands the dimension that is sharded over it" if axes else ""
    tables.write(screen, Text.assemble(("parameters", "bold"), f" of rank {rank}{under}"), columns, rows)
    whole = sum(math.prod(s.global_shape) for s in shards)
    held = sum(math.prod(s.local_shape) for s in shards)
    total = size(sum(s.bytes for s in shards))
    _hanging("  ", f"{whole:,} parameters; this rank holds {held:,} of them, {total}", screen)
    screen.print()


def _styles(shard: ParameterShard) -> str:
    """The style that placed it; fsdp alone where no other did, and why fsdp leaves it whole."""
    names = [s for s in shard.styles if s != "fsdp"] or list(shard.styles) or ["-"]
    return "\n".join(names) + (f"\n({shard.reason})" if shard.reason else "")


def _folded(shards: Iterable[ParameterShard]) -> list[tuple[list[str], ParameterShard]]:
    """Parameters that differ in nothing but their name, together, in order of the first."""
    groups: dict[tuple[object, ...], tuple[list[str], ParameterShard]] = {}
    for s in shards:
        key = (s.dtype, s.global_shape, s.local_shape, tuple(s.placements.items()), s.styles, s.reason)
        groups.setdefault(key, ([], s))[0].append(s.name)
    return list(groups.values())


def _modules(program: Program, screen: Console) -> None:
    """Styles that do not show in the parameters' table."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for application in program:
        if application.slot != "params":
            key = (
                application.style,
                "+".join(application.axes),
                _flows(application),
                _place(application.rule.span),
            )
            groups.setdefault(key, []).append(application.module)
    if not groups:
        return
    columns = [
        Column("module", wrap="path"),
        Column("style"),
        Column("axis", spare=1),
        Column("layouts", wrap="words"),
        Column("rule", spare=2),
    ]
    rows = [
        ["\n".join(path or "(root)" for path in fold_paths(modules)), *key] for key, modules in groups.items()
    ]
    tables.write(screen, Text("modules", "bold"), columns, rows)
    screen.print()


def _flows(application: Application) -> str:
    """What is done to inputs and outputs, a line each."""
    lines = []
    for option in ("input", "output"):
        for name, flow in (application.options.get(option) or {}).items():
            lines.append(f"{option} {f'{name}: ' if name else ''}{flow}")
    return "\n".join(lines)


def _place(span: Span) -> str:
    return "command line" if span.file.startswith("<override") else f"{Path(span.file).name}:{span.line}"


def _buffers(program: Program, screen: Console) -> None:
    plan, cp = program.plan, program.mesh.sizes["cp"]
    if cp == 1 or not (plan.batch or plan.buffers):
        return
    screen.print(Text.assemble(("buffers", "bold"), f"  split over cp={cp}"))
    _hanging("  order  ", dealt_out(program), screen)
    for title, entries in (("batch", plan.batch), ("model", plan.buffers)):
        if entries:
            _hanging(f"  {title}  ", ", ".join(_split(b) for b in entries.values()), screen)
    screen.print()


def dealt_out(program: Program) -> str:
    """Which rows each rank gets, and the busiest rank's attention over the mean."""
    plan, cp = program.plan, program.mesh.sizes["cp"]
    balance = plan.balance
    if balance == "auto" and any(b.documents for b in plan.batch.values()):
        balance = "by-cost" if plan.buffers else "per-document"
    if balance in ("per-document", "by-cost"):
        how = "each document's head and tail paired" if balance == "per-document" else "by cost"
        return f"{how}: the busiest rank's attention over the mean depends on the batch"
    how = "neighbouring rows" if balance == "none" else "head and tail chunks paired"
    most = imbalance(static_order(balance, cp), 2 * cp * 512)
    return f"{how}: under a causal mask the busiest rank has {most:.2f} of the mean work"


def _split(buffer: Buffer) -> str:
    return f"{buffer.name} ({f'made: {buffer.make}' if buffer.make else f'dimension {buffer.dim}'})"


def _short(placement: str) -> str:
    """`-`, or the number of the sharded dimension."""
    return "-" if placement == "replicate" else placement.removeprefix("shard(").removesuffix(")")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
