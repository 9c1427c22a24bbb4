"""The indices of a parameter that a rank holds, as runs in the parameter's original order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parallelizer.mesh import cut_all
from parallelizer.styles.packing import Packing


@dataclass(frozen=True)
class IndexRun:
    """`count` indices of one dimension that begin at `local` in a rank's shard and at `original` in the parameter."""

    local: int
    original: int
    count: int


@dataclass(frozen=True)
class Share:
    """What one rank holds of a parameter: runs for each dimension, of which it holds every combination."""

    runs: tuple[tuple[IndexRun, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape."""
        return tuple(sum(run.count for run in own) for own in self.runs)

    def within(self, box: Sequence[tuple[int, int]]) -> Share:
        """What of it lies in a box of the original parameter, (start, count) for each dimension."""
        return Share(
            tuple(
                tuple(part for run in own if (part := _within(run, start, count)).count > 0)
                for own, (start, count) in zip(self.runs, box, strict=True)
            )
        )

    def boxes(self) -> Iterator[tuple[tuple[IndexRun, ...], tuple[slice, ...], tuple[slice, ...]]]:
        """Every combination of runs: it, where it lies in the shard, and where in the parts put side by side."""
        beside = [list(itertools.accumulate((run.count for run in own), initial=0))[:-1] for own in self.runs]
        for places in itertools.product(*(range(len(own)) for own in self.runs)):
            runs = tuple(own[i] for own, i in zip(self.runs, places, strict=True))
            starts = [at[i] for at, i in zip(beside, places, strict=True)]
            yield (
                runs,
                tuple(slice(r.local, r.local + r.count) for r in runs),
                tuple(slice(s, s + r.count) for s, r in zip(starts, runs, strict=True)),
            )


def original_shape(param: torch.Tensor, packing: Packing | None) -> tuple[int, ...]:
    """The shape that the parameter has in the unsharded model."""
    shape = list(param.shape)
    if packing is not None:
        shape[packing.dim] = sum(packing.parts)
    return tuple(shape)


def share(param: torch.Tensor, packing: Packing | None, rank: int | None = None) -> Share:
    """What a rank of the parameter's mesh holds: this one, or the one of that global number."""
    shape = tuple(param.shape)
    held = [(0, size) for size in shape]
    if isinstance(param, DTensor):
        coordinate = _coordinate(param.device_mesh, rank)
        held = [(0, 0) for _ in shape]
        if coordinate:
            held = cut_all(shape, param.device_mesh, param.placements, coordinate)
    runs = []
    for dim, (start, count) in enumerate(held):
        if packing is not None and dim == packing.dim % len(shape):
            runs.append(_packed(packing.order()[start : start + count]))
        else:
            runs.append((IndexRun(0, start, count),) if count else ())
    return Share(tuple(runs))


def holders(param: torch.Tensor, writer: int) -> list[int]:
    """The ranks (global numbers) from which `writer` gets a parameter: their shards make it up, and of those that hold
    the same, one alone is among them.

    A parameter may lie on a part of the ranks only, and others have copies of it: of a mesh without the writer there are
    none.
    """
    if not isinstance(param, DTensor):
        return [writer]
    ranks = param.device_mesh.mesh
    place = (ranks == writer).nonzero()
    if not len(place):
        return []
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, Replicate):
            ranks = ranks.narrow(dim, int(place[0][dim]), 1)
    return sorted(ranks.flatten().tolist())


def _coordinate(mesh: DeviceMesh, rank: int | None) -> list[int]:
    if rank is None:
        here = mesh.get_coordinate()
        return list(here) if here is not None else []
    return [int(i) for i in (mesh.mesh == rank).nonzero()[0]]


def _packed(order: torch.Tensor) -> tuple[IndexRun, ...]:
    """Runs of consecutive original indices."""
    if not len(order):
        return ()
    breaks = ((order[1:] - order[:-1]) != 1).nonzero().flatten().add(1).tolist()
    edges = [0, *breaks, len(order)]
    return tuple(IndexRun(a, int(order[a]), b - a) for a, b in itertools.pairwise(edges))


def _within(run: IndexRun, start: int, count: int) -> IndexRun:
    first, end = max(run.original, start), min(run.original + run.count, start + count)
    return IndexRun(run.local + first - run.original, first, end - first)
