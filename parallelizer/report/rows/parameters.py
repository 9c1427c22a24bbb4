"""The rows of the tables of parameters: what one rank holds, parameters that differ in their names alone together."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from parallelizer.compiler.parameter_shards import ParameterShard
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import full_name
from parallelizer.report.rows.paths import shown_paths
from parallelizer.styles.application import Program

Uses = tuple[tuple[str, Span], ...]
"""The styles that place a parameter, each with the place of its rule."""


@dataclass(frozen=True)
class ParameterRow:
    """Parameters of which a rank holds the same; `shard` is the first of them."""

    shard: ParameterShard
    names: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The names, folded."""
        return shown_paths(self.names)

    @property
    def bytes(self) -> int:
        """What the rank holds of all of them."""
        return self.shard.bytes * len(self.names)


@dataclass(frozen=True)
class ParameterTotal:
    """Numbers of the whole model and of what a rank holds of it, and the bytes of the latter."""

    whole: int
    held: int
    bytes: int


def parameter_rows(
    shards: Iterable[ParameterShard], apart: Callable[[ParameterShard], Hashable] = lambda shard: None
) -> list[ParameterRow]:
    """Rows in the order of their first parameters. `apart` is what a table tells of a parameter beside its
    dtype, shapes, placements, and why it is whole: where that differs there are two rows."""
    groups: dict[tuple[object, ...], list[ParameterShard]] = {}
    for s in shards:
        key = (s.dtype, s.global_shape, s.local_shape, tuple(s.placements.items()), s.reason, apart(s))
        groups.setdefault(key, []).append(s)
    return [ParameterRow(alike[0], tuple(s.name for s in alike)) for alike in groups.values()]


def parameter_total(shards: Iterable[ParameterShard], program: Program | None = None) -> ParameterTotal:
    """The sums under the table. Of a program with stages the shards are those of a few."""
    shards = list(shards)
    stages = program.stages if program is not None else None
    return ParameterTotal(
        stages.parameters if stages is not None else sum(math.prod(s.global_shape) for s in shards),
        sum(math.prod(s.local_shape) for s in shards),
        sum(s.bytes for s in shards),
    )


def uses_by_name(program: Program) -> dict[str, Uses]:
    """Of each parameter that a style places, the styles and their rules in the order of application."""
    uses: dict[str, Uses] = {}
    for a in program.of_slot("params", "experts", "fsdp"):
        for name in a.params:
            full = full_name(a.module, name)
            uses[full] = (*uses.get(full, ()), (a.style, a.rule.span))
    return uses


def mesh_axes(shards: Sequence[ParameterShard]) -> list[str]:
    """The axes that placements are told for: those above 1, fsdp's folded."""
    return list(dict.fromkeys(axis for shard in shards for axis in shard.placements))


def sharding_axes(shards: Sequence[ParameterShard]) -> list[str]:
    """Those of the axes over which anything is sharded."""
    return [
        a for a in mesh_axes(shards) if any(s.placements.get(a, "replicate") != "replicate" for s in shards)
    ]


def shape(sizes: Sequence[int], times: str = "x") -> str:
    """`256x64`, or `scalar`."""
    return times.join(map(str, sizes)) or "scalar"
