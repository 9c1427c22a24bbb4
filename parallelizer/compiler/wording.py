"""The one-line form of places, values and placements in `explain` and in notes on exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelizer.compiler.parameter_shards import ParameterShard
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import TENSOR_AXES, Flow, Placement
from parallelizer.styles.conversions import Conversion

SHARDED_LOSS = (
    "`parallelizer.cross_entropy` and `F.cross_entropy` support sharded logits; for another loss gather them in the plan: "
    "`output: replicate` without `local: false`"
)
"""What to do about a loss that does not run on DTensors."""


def dims(shard: ParameterShard) -> list[str]:
    """For each dimension of a parameter the axes that shard it, innermost cut first, or `-`."""
    tensor_first = sorted(shard.placements.items(), key=lambda item: item[0].split("+")[0] not in TENSOR_AXES)
    axes: list[list[str]] = [[] for _ in shard.global_shape]
    for axis, placement in tensor_first:
        if placement.startswith("shard("):
            axes[int(placement[6:-1])].append(axis)
    return [" x ".join(names) or "-" for names in axes]


def place(span: Span) -> str:
    """A place in a line of text: file and line, or what was typed."""
    if span.file.startswith("<override "):
        text = span.file.removeprefix("<override ").removesuffix(">")
        return f"the override {text if len(text) <= 48 else text.partition('=')[0] + '=...'}"
    return span.file if span.file.startswith("<") else f"{span.file}:{span.line}"


def flow(conversion: Conversion) -> str:
    """What happens to one input or output."""
    which = "output" if conversion.leaves else "input"
    name = f" {conversion.name}" if conversion.name else ""
    kinds = {"gather": "gathered", "reduce": "summed", "split": "split"}
    done = f", {kinds[conversion.kind]} over {conversion.axis}" if conversion.kind else ""
    change = f"{conversion.before} -> {conversion.after}"
    return f"{which}{name}: {change if conversion.before != conversion.after else conversion.before}{done}"


def layout_names(value: Any) -> list[str]:
    """The layouts' names in a value."""
    if isinstance(value, Placement):
        return [value.name] if value.name else []
    if isinstance(value, Flow):
        return layout_names(value.arrives) + layout_names(value.wanted)
    return (
        [name for part in value.values() for name in layout_names(part)] if isinstance(value, Mapping) else []
    )


def written(value: Any) -> str:
    """A value as YAML of the plan language."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, Mapping):
        if list(value) == [""]:
            return written(value[""])
        return "{" + ", ".join(f"{name}: {written(part)}" for name, part in value.items()) + "}"
    return str(value)
