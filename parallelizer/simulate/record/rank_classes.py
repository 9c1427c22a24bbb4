"""Which ranks are alike: found by arithmetic on each axis, so that 16,384 ranks cost what 16 do.

Ranks differ where a dimension does not divide (the last ones then hold less, or nothing), in the blocks of
the attention matrix that they compute under context parallelism, and in the stages of a pipeline that they run. Nothing
else in a step depends on the rank.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelizer.language.pipeline.settings import stage_rank
from parallelizer.language.plan import EXPERT, EXPERT_SHARDS, TENSOR_AXES, Mesh, Placement, full_name
from parallelizer.mesh import cut
from parallelizer.styles.application import Program, tensor_placements

Shape = tuple[int, ...]
Tensors = Mapping[tuple[Shape, tuple[tuple[str, int], ...], int | None], int]
"""Parameters without names: the shape, the dimension sharded by each tensor axis, and the one sharded over
the data axes; and the bytes of one element of all such parameters together.
"""


@dataclass(frozen=True)
class RankClass:
    """Ranks that are alike: the smallest, their number, and the bytes of parameters that each of them holds.

    `peak` is the memory of a step at its fullest, `sent_bytes` what each sends in it, None if that was not
    traced.
    """

    rank: int
    ranks: int
    parameters_bytes: int
    peak: int | None = None
    sent_bytes: int | None = None

    def as_json(self) -> dict[str, int | None]:
        """One entry of the documented form."""
        return {
            "rank": self.rank,
            "ranks": self.ranks,
            "parameters_bytes": self.parameters_bytes,
            "peak": self.peak,
            "sent_bytes": self.sent_bytes,
        }


class Likeness:
    """Tells the ranks of a program apart by what they hold, and by their part of the sequence if attention is
    causal. `model` is as it was compiled: unsharded.
    """

    def __init__(self, program: Program, model: nn.Module, *, causal: bool = True) -> None:
        self.mesh, self.stages = program.mesh, program.stages
        self.by_stages = _tensors(program, model)
        of_attention = {axis for a in program.of_slot("attention") for axis in a.axes}
        self.split = of_attention if causal else set()
        # A rank of `ep` that gets more tokens than others is no class of theirs.
        self.uneven = self.mesh.ep > 1 and str(program.routing) != "balanced"
        self.counted = bool(program.routing.counted)

    def classes(self) -> list[RankClass]:
        """Every class, in order of the smallest rank."""
        mesh = self.mesh
        if self.uneven:
            return self._counted()
        same = mesh.size("dp_replicate") if self.stages else mesh.size("pp", "dp_replicate")
        classes = []
        for p, tensors in enumerate(self.by_stages):
            first = p * (mesh.world_size // mesh.sizes["pp"])
            for place, alike, sizes in _by_tensor_axes(mesh, tensors, self.split):
                for d, c, count in _by_data_axes(mesh, sizes, "cp" in self.split):
                    inner = (d * mesh.sizes["cp"] + c) * mesh.sizes["tp_outer"] + place[0]
                    rank = first + inner * mesh.sizes["tp"] + place[1]
                    classes.append(RankClass(rank, same * alike * count, self._bytes(rank)))
        return sorted(classes, key=lambda c: c.rank)

    def _counted(self) -> list[RankClass]:
        """The classes, found by looking at every rank."""
        first: dict[object, int] = {}
        ranks: collections.Counter[object] = collections.Counter()
        for rank in range(self.mesh.world_size):
            kind = self.kind(rank)
            first.setdefault(kind, rank)
            ranks[kind] += 1
        return [RankClass(rank, ranks[kind], self._bytes(rank)) for kind, rank in first.items()]

    def _held(self, rank: int) -> Tensors:
        return self.by_stages[self.stage_rank(rank)]

    def stage_rank(self, rank: int) -> int:
        """The place on `pp` of a rank in a pipeline; 0 without one."""
        return self.mesh.coordinate(rank)["pp"] if self.stages else 0

    def shapes(self, rank: int) -> tuple[Shape, ...]:
        """The local shapes of one rank, each that there is once."""
        index = self.mesh.coordinate(rank)
        axes = self.mesh.fsdp_axes
        folded = 0
        for axis in axes:
            folded = folded * self.mesh.sizes[axis] + index[axis]
        found = []
        for shape, cuts, dim in self._held(rank):
            local = list(_cut(shape, cuts, self.mesh, index))
            if dim is not None and axes:
                _, local[dim] = cut(local[dim], self.mesh.size(*axes), folded)
            found.append(tuple(local))
        return tuple(found)

    def kind(self, rank: int) -> object:
        """Equal for two ranks of one class, and for no others."""
        index = self.mesh.coordinate(rank)
        place = tuple(index[axis] for axis in sorted(self.split))
        return self.stage_rank(rank), self.shapes(rank), place, self._among_experts(rank)

    def kind_of_stage(self, rank: int) -> object:
        """As `kind`, whatever the place in the pipeline."""
        index = self.mesh.coordinate(rank)
        return self.shapes(rank), tuple(index[axis] for axis in sorted(self.split)), self._among_experts(rank)

    def _among_experts(self, rank: int) -> int:
        if not self.uneven:
            return 0
        return rank if self.counted else self.mesh.expert_place(rank)[1]

    def _bytes(self, rank: int) -> int:
        shapes = self.shapes(rank)
        held = self._held(rank).values()
        return sum(math.prod(shape) * size for shape, size in zip(shapes, held, strict=True))


def rank_classes(program: Program, model: nn.Module, *, causal: bool = True) -> list[RankClass]:
    """The classes of ranks whose local shapes and attention blocks are the same, in order of the ranks.
    `model` is as it was compiled: unsharded.

    Under context parallelism every index on its axis is a class of its own, but without a causal mask they
    are alike.
    """
    return Likeness(program, model, causal=causal).classes()


def _tensors(program: Program, model: nn.Module) -> list[Tensors]:
    """Those of each rank on `pp`; of all ranks together where the model is not cut."""
    stages = program.stages
    ranks = () if stages is None else stage_rank(stages.pipeline, stages.ranks)
    tensor = tensor_placements(program.applications)
    data = {full_name(a.module, n): p for a in program.of_slot("fsdp") for n, p in a.params.items()}
    found = [collections.Counter[Any]() for _ in range(1 if stages is None else stages.ranks)]
    for name, param in model.named_parameters():
        cuts = tuple((axis, p.dim) for axis, p in tensor.get(name, {}).items() if p.dim is not None)
        shape, dim = tuple(param.shape), _dim(data.get(name, {}))
        if EXPERT in tensor.get(name, {}):  # both of its axes divide, so all ranks hold as much
            shape, cuts, dim = _of_experts(shape, cuts, dim, program.mesh), (), None
        for rank in (0,) if stages is None else (ranks[stage] for stage in stages.copies(name)):
            found[rank][shape, cuts, dim] += param.element_size()
    return [*found]


def _of_experts(shape: Shape, cuts: Iterable[tuple[str, int]], dim: int | None, mesh: Mesh) -> Shape:
    """The local shape of a parameter of experts that are shared out."""
    local = list(shape)
    for axis, cut_dim in (*cuts, *(((EXPERT_SHARDS, dim),) if dim is not None else ())):
        local[cut_dim] //= mesh.size_of(axis)
    return tuple(local)


def _dim(placements: Mapping[str, Placement]) -> int | None:
    return next((p.dim for p in placements.values()), None)


def _by_tensor_axes(
    mesh: Mesh, tensors: Tensors, split: Iterable[str]
) -> Iterator[tuple[tuple[int, int], int, frozenset[int]]]:
    """Classes of indices on `tp_outer` and `tp`: the first pair, their number, and the sizes that are left for the
    data axes to shard.
    """
    classes: dict[Any, list[tuple[int, int]]] = {}
    sizes: dict[Any, frozenset[int]] = {}
    for outer, tp in itertools.product(range(mesh.sizes["tp_outer"]), range(mesh.sizes["tp"])):
        index = {"tp_outer": outer, "tp": tp}
        local = {(_cut(shape, cuts, mesh, index), dim) for shape, cuts, dim in tensors}
        key = frozenset(local), tuple(index[a] for a in TENSOR_AXES if a in split)
        classes.setdefault(key, []).append((outer, tp))
        sizes[key] = frozenset(shape[dim] for shape, dim in local if dim is not None)
    for key, members in classes.items():
        yield members[0], len(members), sizes[key]


def _cut(shape: Shape, cuts: Iterable[tuple[str, int]], mesh: Mesh, index: Mapping[str, int]) -> Shape:
    local = list(shape)
    for axis, dim in cuts:
        _, local[dim] = cut(local[dim], mesh.sizes[axis], index[axis])
    return tuple(local)


def _by_data_axes(mesh: Mesh, sizes: Iterable[int], by_context: bool) -> Iterator[tuple[int, int, int]]:
    """Classes of indices on `dp_shard` and `cp`, folded where parameters are sharded: the first pair, and
    their number.
    """
    shards, contexts = mesh.sizes["dp_shard"], mesh.sizes["cp"]
    edges = _edges(sizes, shards * contexts)
    for start, stop in itertools.pairwise(edges):
        found: dict[int, tuple[tuple[int, int], int]] = {}
        for c in range(contexts):
            first, last = (min(max(math.ceil((edge - c) / contexts), 0), shards) for edge in (start, stop))
            if first < last:
                key = c if by_context else 0
                place, count = found.get(key, ((first, c), 0))
                found[key] = min(place, (first, c)), count + last - first
        for (d, c), count in found.values():
            yield d, c, count


def _edges(sizes: Iterable[int], ranks: int) -> list[int]:
    """The folded indices at which some shard's size changes, from 0 to `ranks`."""
    edges = {0, ranks}
    for size in sizes:
        chunk = max(cut(size, ranks, 0)[1], 1)
        edges |= {min(size // chunk, ranks), min(math.ceil(size / chunk), ranks)}
    return sorted(edges)
