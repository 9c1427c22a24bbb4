"""Which ranks are alike: found by arithmetic on each axis, so that 16,384 ranks cost what 16 do.

Ranks differ where a dimension does not divide (the last ones then hold less, or nothing) and in the blocks of
the attention matrix that they compute under context parallelism. Nothing else in a step depends on the rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from parallelizer.plan import Mesh, Placement, full_name
from parallelizer.program import Program, tensor_placements

Shape = tuple[int, ...]
Tensors = frozenset[tuple[Shape, tuple[tuple[str, int], ...], int | None]]
"""Parameters without names: the shape, the dimension sharded by each tensor axis, and the one sharded over
the data axes.
"""


def rank_classes(program: Program, model: nn.Module) -> list[tuple[int, int]]:
    """The classes of ranks whose local shapes and attention blocks are the same, as (smallest rank, number of
    ranks), in order of the ranks. `model` is as it was compiled: unsharded.

    Under context parallelism every index on its axis is a class of its own, though without a causal mask they
    are alike.
    """
    mesh = program.mesh
    split = {axis for a in program.of_slot("attention") for axis in a.axes}
    tensors = _tensors(program, model)
    same = mesh.size("pp", "dp_replicate")
    classes = []
    for place, alike, sizes in _by_tensor_axes(mesh, tensors, split):
        for d, c, count in _by_data_axes(mesh, sizes, "cp" in split):
            rank = ((d * mesh.sizes["cp"] + c) * mesh.sizes["ep"] + place[0]) * mesh.sizes["tp"] + place[1]
            classes.append((rank, same * alike * count))
    return sorted(classes)


def _tensors(program: Program, model: nn.Module) -> Tensors:
    tensor = tensor_placements(program.applications)
    data = {full_name(a.module, n): p for a in program.of_slot("fsdp") for n, p in a.params.items()}
    found = set()
    for name, param in model.named_parameters():
        cuts = tuple((axis, p.dim) for axis, p in tensor.get(name, {}).items() if p.dim is not None)
        found.add((tuple(param.shape), cuts, _dim(data.get(name, {}))))
    return frozenset(found)


def _dim(placements: Mapping[str, Placement]) -> int | None:
    return next((p.dim for p in placements.values()), None)


def _by_tensor_axes(
    mesh: Mesh, tensors: Tensors, split: Iterable[str]
) -> Iterator[tuple[tuple[int, int], int, frozenset[int]]]:
    """Classes of indices on `ep` and `tp`: the first pair, their number, and the sizes that are left for the
    data axes to shard.
    """
    classes: dict[Any, list[tuple[int, int]]] = {}
    sizes: dict[Any, frozenset[int]] = {}
    for ep, tp in itertools.product(range(mesh.sizes["ep"]), range(mesh.sizes["tp"])):
        index = {"ep": ep, "tp": tp}
        local = {(_cut(shape, cuts, mesh, index), dim) for shape, cuts, dim in tensors}
        key = frozenset(local), tuple(index[a] for a in ("ep", "tp") if a in split)
        classes.setdefault(key, []).append((ep, tp))
        sizes[key] = frozenset(shape[dim] for shape, dim in local if dim is not None)
    for key, members in classes.items():
        yield members[0], len(members), sizes[key]


def _cut(shape: Shape, cuts: Iterable[tuple[str, int]], mesh: Mesh, index: Mapping[str, int]) -> Shape:
    local = list(shape)
    for axis, dim in cuts:
        local[dim] = _local_size(local[dim], mesh.sizes[axis], index[axis])
    return tuple(local)


def _local_size(size: int, ranks: int, index: int) -> int:
    """What torch gives one of `ranks` of a dimension: chunks of one size, the last ones smaller or empty."""
    chunk = math.ceil(size / ranks)
    return max(0, min(chunk, size - index * chunk))


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
        chunk = max(math.ceil(size / ranks), 1)
        edges |= {min(size // chunk, ranks), min(math.ceil(size / chunk), ranks)}
    return sorted(edges)
