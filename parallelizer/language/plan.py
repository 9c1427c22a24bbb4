"""The plan language as frozen data: what the parser yields and the compiler reads. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.glob import Glob

FOLDED = "dp_shard+cp"
"""Name of the axis that parameters are sharded over when both `dp_shard` and `cp` are above 1."""


REDISTRIBUTE = ("greedy", "min-cost")
"""How DTensors of several axes move: see `redistribution.py`."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp_outer", "tp")
"""The axes whose sizes multiply to the number of ranks, outermost first: neighbouring ranks differ in `tp`."""

EXPERT = "ep"
"""The key of a mesh that is no axis of its own: ranks of one replica, taken innermost first, among which experts are shared
out. It multiplies nothing."""

EXPERT_SHARDS = "efsdp"
"""Name of the axis that the parameters of experts are sharded over by fsdp: what `ep` leaves of the ranks of a replica."""

REPLICA_AXES = ("dp_shard", "cp", "tp_outer", "tp")
"""The axes that `ep` is taken out of. Their ranks hold one replica of the model, or of a stage."""

MESH_KEYS = ("pp", "dp_replicate", "dp_shard", "cp", EXPERT, "tp_outer", "tp")
"""What a preset's `mesh` may set."""

AXIS_MEANINGS = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas of everything",
    "dp_shard": "shards of parameters, gradients and optimizer state",
    "cp": "parts of each sequence",
    "ep": "shares of the experts, taken out of the ranks of dp_shard, cp and tp",
    "efsdp": "shards of the experts' parameters, over what ep leaves of a replica",
    "tp_outer": "slices of each layer, a second axis around tp",
    "tp": "slices of each layer",
}
"""What the ranks along an axis are, or have."""

TENSOR_AXES = ("tp_outer", "tp")
"""The axes that tensor styles place parameters on."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks see different tokens, so that gradients must be summed over them."""

BATCH_AXES = ("dp_replicate", "dp_shard")
"""Axes over which the rows of the global batch are dealt out."""

SLOTS = (
    "stage",
    "precision",
    "params",
    "io",
    "random",
    "attention",
    "experts",
    "checkpoint",
    "compile",
    "fsdp",
)
"""What a style can fill on a module, in the order of application. `io` is one slot per axis."""


@dataclass(frozen=True)
class Placement:
    """`replicate`, `shard(dim)`, `partial`, or the name of a layout that stands for one of them."""

    kind: str
    dim: int | None = None
    name: str | None = None
    span: Span | None = field(default=None, compare=False)

    def __str__(self) -> str:
        if self.kind == "shard":
            return f"shard({self.dim})"
        return self.name or self.kind


REPLICATE = Placement("replicate")
PARTIAL = Placement("partial")


def shard(dim: int) -> Placement:
    """The placement `shard(dim)`."""
    return Placement("shard", dim)


@dataclass(frozen=True)
class Flow:
    """How a tensor arrives at a module and how the module wants it (or hands it on).

    `shard(1) -> replicate` sets both. A single placement sets `arrives` of an input and `wanted` of an
    output; the other side is the style's own.
    """

    arrives: Placement | None = None
    wanted: Placement | None = None

    def __str__(self) -> str:
        return " -> ".join(str(p) for p in (self.arrives, self.wanted) if p is not None)


@dataclass(frozen=True)
class Option:
    """One option of a style as written: its value, already of the declared kind, and where it stands.

    `parts` says where the keys of a value stand that is a map, `outer.inner` those of a map in it.
    """

    value: Any
    span: Span
    parts: Mapping[str, Span] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class StyleUse:
    """One style in a rule, with the options given there."""

    style: str
    options: Mapping[str, Option]
    span: Span


@dataclass(frozen=True)
class Rule:
    """One line of a plan: a glob and what it says for every module (or parameter) that matches.

    `empties` names the slots that the rule leaves without a style (`none`); a style in `uses` fills its own.
    """

    glob: Glob
    uses: tuple[StyleUse, ...]
    span: Span
    empties: frozenset[str] = frozenset()
    optional: bool = False

    @property
    def key(self) -> str:
        """The glob as written."""
        return self.glob.text


@dataclass(frozen=True)
class Buffer:
    """A tensor whose dimension `dim` is the sequence; `make` names what is made instead of split.

    `pad` is what a batch entry is filled up with where its length does not divide; `documents` says that it tells of
    each token which packed document it is in.
    """

    name: str
    span: Span
    dim: int | None = None
    make: str | None = None
    pad: int | None = None
    documents: bool = False


@dataclass(frozen=True)
class Plan:
    """Rules in order of precedence (later rules win), layouts by name, and the buffers with a sequence
    dimension.
    """

    name: str
    file: str
    rules: tuple[Rule, ...] = ()
    layouts: Mapping[str, Placement] = field(default_factory=dict)
    batch: Mapping[str, Buffer] = field(default_factory=dict)
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    balanced: str | None = None
    """How the sequence is dealt out over cp, once a compiler has settled it."""
    added: int = field(default=0, compare=False)
    """How many rules, at the end, are a preset's or the command line's."""

    @property
    def balance(self) -> str:
        """How the sequence is dealt out over cp: as settled, or as the last rule says, or `auto`."""
        said = [
            use.options["balance"].value
            for rule in self.rules
            for use in rule.uses
            if use.style == "context-parallel" and "balance" in use.options
        ]
        return self.balanced or (said[-1] if said else "auto")

    def with_rules(self, rules: tuple[Rule, ...]) -> Plan:
        """This plan with more rules after its own, which take precedence."""
        return replace(self, rules=self.rules + rules, added=self.added + len(rules))

    def with_layouts(self, layouts: Mapping[str, Placement]) -> Plan:
        """This plan with some layouts replaced."""
        return replace(self, layouts={**self.layouts, **layouts})


@dataclass(frozen=True)
class StyleDefaults:
    """What a preset says of one style wherever it is used: option defaults, or that it is off."""

    options: Mapping[str, Option] = field(default_factory=dict)
    off: bool = False


@dataclass(frozen=True)
class Mesh:
    """The sizes of all axes of `AXES`, and `ep`. `spans` contains the places where sizes were set.

    `sizes` may be given with the key `ep`. Raises ValueError for an unknown key, a size below 1, and an `ep` that does not
    divide the ranks of a replica.
    """

    sizes: Mapping[str, int]
    spans: Mapping[str, Span] = field(default_factory=dict, compare=False)
    ep: int = 1

    def __post_init__(self) -> None:
        unknown = [a for a in self.sizes if a not in MESH_KEYS]
        if unknown:
            raise ValueError(f"unknown mesh axis {unknown[0]!r}: the axes are {', '.join(MESH_KEYS)}")
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"the size of mesh axis {axis} is {size!r}: it is a whole number from 1")
        object.__setattr__(self, "ep", self.sizes.get(EXPERT, self.ep))
        object.__setattr__(self, "sizes", {a: self.sizes.get(a, 1) for a in AXES})
        if self.replica % self.ep:
            raise ValueError(f"ep={self.ep} does not divide the {self.replica} ranks of {self._of_replica()}")

    def size(self, *axes: str) -> int:
        """The product of the sizes of some axes."""
        return math.prod(self.size_of(a) for a in axes)

    def size_of(self, axis: str) -> int:
        """The size of an axis, or of `ep` or `efsdp`."""
        if axis == EXPERT:
            return self.ep
        return self.replica // self.ep if axis == EXPERT_SHARDS else self.sizes[axis]

    @property
    def every(self) -> dict[str, int]:
        """The sizes of all keys of `MESH_KEYS`."""
        return {key: self.size_of(key) for key in MESH_KEYS}

    @property
    def replica(self) -> int:
        """Number of ranks that `ep` is taken out of."""
        return math.prod(self.sizes[a] for a in REPLICA_AXES)

    def expert_place(self, rank: int) -> tuple[int, int]:
        """A rank's index on `efsdp`, and on `ep`."""
        where, index = self.coordinate(rank), 0
        for axis in REPLICA_AXES:
            index = index * self.sizes[axis] + where[axis]
        return divmod(index, self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product over all axes."""
        return math.prod(self.sizes.values())

    @property
    def fsdp_axes(self) -> tuple[str, ...]:
        """The axes above 1 that parameters are sharded over, folded into one."""
        return tuple(a for a in ("dp_shard", "cp") if self.sizes[a] > 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """A rank's index on every axis, `tp` fastest."""
        index = {}
        for axis in reversed(AXES):
            rank, index[axis] = divmod(rank, self.sizes[axis])
        return {a: index[a] for a in AXES}

    def __str__(self) -> str:
        axes = " x ".join(f"{a}={n}" for a, n in self.sizes.items() if n > 1) or "1 rank"
        return f"{axes}, ep={self.ep}" if self.ep > 1 else axes

    def _of_replica(self) -> str:
        above = [f"{a}={self.sizes[a]}" for a in REPLICA_AXES if self.sizes[a] > 1]
        return " x ".join(above) or "dp_shard x cp x tp"


def full_name(module: str, name: str) -> str:
    """The name from the root of the parameter that is called `name` inside `module`."""
    return f"{module}.{name}" if module else name


def folded_name(mesh: Mesh) -> str:
    """How the axis that FSDP shards over is written: `dp_shard`, `cp` or `dp_shard+cp`."""
    return "+".join(mesh.fsdp_axes) or "dp_shard"
