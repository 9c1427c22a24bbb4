"""The plan as tables: the mesh, what each rank holds of which parameter, what is done to which module, and
the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from parallelizer.compiler import Program
from parallelizer.fold import fold_paths
from parallelizer.plan import AXES
from parallelizer.shards import ParameterShard, parameter_shards

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
    """Print the plan of a program. Colour and width follow the terminal; a file gets plain text of 100
    columns.
    """
    terminal = stream.isatty()
    console = Console(
        file=stream, width=width or (None if terminal else 100), highlight=False, soft_wrap=False
    )
    shards = parameter_shards(program, model, rank)
    _mesh(program, console)
    _parameters(shards, rank, console)
    _modules(program, console)
    _buffers(program, console)


def _mesh(program: Program, console: Console) -> None:
    mesh = program.mesh
    ranks = f"{mesh.world_size:,} rank{'s' if mesh.world_size > 1 else ''}"
    console.print(
        Text.assemble(("mesh", "bold"), f"  {ranks}: {mesh}" if mesh.world_size > 1 else f"  {ranks}")
    )
    stride = mesh.world_size
    for axis in AXES:
        size = mesh.sizes[axis]
        stride //= size
        if size > 1:
            near = "neighbouring ranks" if stride == 1 else f"ranks {stride:,} apart"
            console.print(f"  {axis:<13}{size:>6}  {_MEANING[axis]}, {near}")
    if len(mesh.fsdp_axes) > 1:
        console.print(
            f"  fsdp shards over {' and '.join(mesh.fsdp_axes)} folded: {mesh.size(*mesh.fsdp_axes):,} ranks"
        )
    console.print()


def _parameters(shards: Sequence[ParameterShard], rank: int, console: Console) -> None:
    title = Text.assemble(
        ("parameters", "bold"), f" of rank {rank}; under an axis stands the dimension that is sharded over it"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    axes = list(shards[0].placements) if shards else []
    table.add_column("parameter", overflow="fold", ratio=3)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("style", overflow="fold")
    for axis in axes:
        table.add_column(axis.replace("+", "\n+"), justify="center", no_wrap=True)
    for name in ("global", "local"):
        table.add_column(name, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for names, shard in _folded(shards):
        table.add_row(
            "\n".join(fold_paths(names)),
            f"{len(names):,}",
            _styles(shard),
            *(_short(shard.placements.get(axis, "replicate")) for axis in axes),
            _shape(shard.global_shape),
            _shape(shard.local_shape),
            size(shard.bytes * len(names)),
        )
    console.print(table)
    total = sum(s.bytes for s in shards)
    count = sum(_numel(s.global_shape) for s in shards)
    console.print(
        f"  {count:,} parameters; this rank holds {sum(_numel(s.local_shape) for s in shards):,} of them, {size(total)}\n"
    )


def _styles(shard: ParameterShard) -> str:
    """The style that placed it; fsdp alone where no other did, and why fsdp leaves it whole."""
    names = [s for s in shard.styles if s != "fsdp"] or list(shard.styles) or ["-"]
    return "\n".join(names) + (f"\n({shard.reason})" if shard.reason else "")


def _folded(shards: Iterable[ParameterShard]) -> list[tuple[list[str], ParameterShard]]:
    """Parameters that differ in nothing but their name, together, in order of the first."""
    groups: dict[tuple[object, ...], tuple[list[str], ParameterShard]] = {}
    for shard in shards:
        key = (
            shard.dtype,
            shard.global_shape,
            shard.local_shape,
            tuple(shard.placements.items()),
            shard.styles,
            shard.reason,
        )
        groups.setdefault(key, ([], shard))[0].append(shard.name)
    return list(groups.values())


def _modules(program: Program, console: Console) -> None:
    """Styles that do not show in the parameters' table."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for application in program:
        if application.slot == "params":
            continue
        flows = [
            f"{option} {', '.join(f'{k}: {f}' if k else str(f) for k, f in application.options[option].items())}"
            for option in ("input", "output")
            if application.options.get(option)
        ]
        place = f"{Path(application.rule.span.file).name}:{application.rule.span.line}"
        key = (application.style, "+".join(application.axes), "; ".join(flows), place)
        groups.setdefault(key, []).append(application.module)
    if not groups:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=Text("modules", "bold"), title_justify="left")
    table.add_column("module", overflow="fold", ratio=3)
    for column in ("style", "axis", "layouts", "rule"):
        table.add_column(column, overflow="fold")
    for (style, axes, flows_text, place), modules in groups.items():
        table.add_row("\n".join(g or "(root)" for g in fold_paths(modules)), style, axes, flows_text, place)
    console.print(table)


def _buffers(program: Program, console: Console) -> None:
    plan, cp = program.plan, program.mesh.sizes["cp"]
    if cp == 1 or not (plan.batch or plan.buffers):
        return
    console.print(Text.assemble(("buffers", "bold"), f"  split over cp={cp}, head and tail chunks paired"))
    for title, entries in (("batch", plan.batch), ("model", plan.buffers)):
        for name, buffer in entries.items():
            what = f"made: {buffer.make}" if buffer.make else f"dimension {buffer.dim}"
            console.print(f"  {title}  {name}  {what}")
    console.print()


def size(count: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _short(placement: str) -> str:
    """`-`, or the number of the sharded dimension."""
    return "-" if placement == "replicate" else placement.removeprefix("shard(").removesuffix(")")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result
