"""The rows of the table of layers: what one rank sends for each over each axis, equal layers together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from parallelizer.language.plan import AXES, EXPERT, EXPERT_SHARDS
from parallelizer.report.rows.paths import shown_paths
from parallelizer.simulate.record.ledger import Collective


@dataclass(frozen=True)
class Layer:
    """What one layer sends: bytes in forward and in backward, and the number of collectives, by axis."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)

    def key(self) -> tuple[object, ...]:
        """Equal for layers that send the same."""
        return tuple(tuple(sorted(c.items())) for c in (self.up, self.down, self.count))

    def sent(self, axis: str) -> int:
        """Bytes over one axis, forward and backward."""
        return self.up[axis] + self.down[axis]

    @property
    def total(self) -> int:
        """Bytes over all axes, forward and backward."""
        return self.up.total() + self.down.total()


@dataclass(frozen=True)
class LayerRow:
    """Layers that send the same, and what each of them sends."""

    names: tuple[str, ...]
    layer: Layer

    @property
    def paths(self) -> list[str]:
        """The layers' paths, folded."""
        return shown_paths(self.names)


def by_layer(ledger: Iterable[Collective]) -> dict[str, Layer]:
    """What each layer sends, in order of first appearance. Forward includes the loss, backward all that
    follows.
    """
    layers: dict[str, Layer] = {}
    for entry in ledger:
        layer = layers.setdefault(layer_of(entry.module), Layer())
        (layer.up if entry.phase in ("forward", "loss") else layer.down)[entry.axis] += entry.wire_bytes
        layer.count[entry.axis] += 1
    return layers


def layer_rows(layers: Mapping[str, Layer]) -> list[LayerRow]:
    """Rows in the order of their first layers."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(layer.key(), []).append(name)
    return [LayerRow(tuple(names), layers[names[0]]) for names in groups.values()]


def axes_of(ledger: Iterable[Collective]) -> list[str]:
    """The axes that something is sent over, innermost first; one that is no axis of the mesh last."""

    order = (*AXES[:2], EXPERT_SHARDS, *AXES[2:], EXPERT)

    def depth(axis: str) -> int:
        first = axis.partition("+")[0]
        return order.index(first) if first in order else -1

    return sorted({e.axis for e in ledger}, key=lambda axis: (-depth(axis), axis))


@lru_cache(maxsize=4096)
def layer_of(module: str) -> str:
    """`layers.7` of `layers.7.attention.wq`: a path up to its first number, or its first name."""
    parts = module.split(".")
    number = next((i for i, p in enumerate(parts) if p.isdigit()), None)
    return ".".join(parts[: number + 1]) if number is not None else parts[0]
