"""Which parts of a whole tensor a rank may hold: its rows, its tokens, its chunk of any dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from parallelizer.language.plan import BATCH_AXES, TENSOR_AXES, Mesh
from parallelizer.proof.rounding import distance, finite_norm, relative_error
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.packing import Packing

Locals = Sequence[torch.Tensor | None]
"""One module's tensor on every rank; None where a rank has none."""


def batch_index(mesh: Mesh, rank: int) -> tuple[int, int]:
    """A rank's index among those that see different rows of the batch, and their number."""
    where, index = mesh.coordinate(rank), 0
    for axis in BATCH_AXES:
        index = index * mesh.sizes[axis] + where[axis]
    return index, mesh.size(*BATCH_AXES)


def slices(
    whole: torch.Tensor,
    shape: torch.Size,
    mesh: Mesh,
    rank: int,
    packing: Packing | None = None,
    order: Order | None = None,
) -> Iterator[torch.Tensor]:
    """Every way in which a tensor of this shape can be this rank's part of the whole: rows by data rank, the
    sequence in `order` (head-tail, if not given) by cp, any dimension in chunks by tp_outer and tp. `packing` is that of the
    last dimension.
    """
    if whole.ndim != len(shape):
        return
    where, (index, data) = mesh.coordinate(rank), batch_index(mesh, rank)
    cp, tp = mesh.sizes["cp"], mesh.size(*TENSOR_AXES)
    candidates = [whole]
    if data > 1 and whole.ndim and whole.shape[0] % data == 0:
        candidates.insert(0, whole.chunk(data, 0)[index])
    if cp > 1:
        order = order or Order(cp)
        candidates += [
            order.split(c, d, where["cp"])
            for c in candidates
            for d in range(c.ndim)
            if c.shape[d] % (2 * cp) == 0
        ]
    for candidate in candidates:
        if candidate.shape == shape:
            yield candidate
        for dim in range(candidate.ndim):
            if tp == 1 or candidate.shape[dim] % tp:
                continue
            piece = where["tp_outer"] * mesh.sizes["tp"] + where["tp"]
            if (
                packing is not None
                and dim == candidate.ndim - 1
                and candidate.shape[dim] == sum(packing.parts)
            ):
                candidate = candidate.index_select(dim, packing.order())
            if candidate.chunk(tp, dim)[piece].shape == shape:
                yield candidate.chunk(tp, dim)[piece]


def holds(
    whole: torch.Tensor,
    local: torch.Tensor,
    mesh: Mesh,
    rank: int,
    bound: float,
    packing: Packing | None = None,
    least: float = 0.0,
    order: Order | None = None,
) -> bool:
    """Whether a local tensor is a part of the whole that this rank may hold. Errors are relative to `least`
    where that is more than the tensor's own norm.
    """
    # A part whose own values are small, a gradient of a masked token say, is as exact as the whole is.
    typical = finite_norm(whole) / math.sqrt(max(1, whole.numel())) * math.sqrt(max(1, local.numel()))
    for part in slices(whole, local.shape, mesh, rank, packing, order):
        if distance(local, part) <= bound * max(typical, finite_norm(part), least):
            return True
    return False


def wrong_ranks(
    whole: torch.Tensor,
    mine: Locals,
    mesh: Mesh,
    bound: float,
    packing: Packing | None = None,
    least: float = 0.0,
    order: Order | None = None,
) -> list[int]:
    """The ranks whose tensor is no part of the whole that their place allows; `least` as in `holds`."""
    return [
        r
        for r, local in enumerate(mine)
        if local is not None and not holds(whole, local, mesh, r, bound, packing, least, order)
    ]


def line(mesh: Mesh, rank: int, axis: str) -> list[int]:
    """The ranks that differ from `rank` on one axis only, itself included."""
    here = mesh.coordinate(rank)
    return [
        r
        for r in range(mesh.world_size)
        if all(c == here[a] for a, c in mesh.coordinate(r).items() if a != axis)
    ]


def above_one(mesh: Mesh) -> list[str]:
    """The axes that have more than one rank."""
    return [a for a, n in mesh.sizes.items() if n > 1]


def partial_axis(
    whole: torch.Tensor, mine: Locals, mesh: Mesh, bound: float, order: Order | None = None
) -> str | None:
    """The axis over which the ranks' tensors sum to the right one, if there is one."""
    for axis in above_one(mesh):
        summed = summed_over(mine, mesh, axis)
        if all(s is not None for s in summed) and not wrong_ranks(whole, summed, mesh, bound, order=order):
            return axis
    return None


def summed_over(mine: Locals, mesh: Mesh, axis: str) -> list[torch.Tensor | None]:
    """The sums of the ranks' tensors over an axis, on every rank; None where they are of several shapes."""
    summed: list[torch.Tensor | None] = []
    for rank in range(len(mine)):
        terms = [t for r in line(mesh, rank, axis) if (t := mine[r]) is not None]
        fit = len(terms) == mesh.sizes[axis] and all(t.shape == terms[0].shape for t in terms)
        summed.append(torch.stack(terms).sum(0) if fit else None)
    return summed


def alike_over(mine: Locals, mesh: Mesh, axis: str, bound: float) -> bool:
    """Whether ranks that differ on one axis only hold the same tensor."""
    return all(
        (one := mine[rank]) is not None
        and all(relative_error(mine[other], one) <= bound for other in line(mesh, rank, axis))
        for rank in range(len(mine))
    )


def separating_axis(wrong: Sequence[int], mesh: Mesh) -> str | None:
    """The one axis whose index separates wrong ranks from right ones; the only axis above 1 where all are
    wrong.
    """
    above = above_one(mesh)
    if len(above) == 1:
        return above[0]
    if len(wrong) == mesh.world_size:
        return None
    for axis in above:
        if len({mesh.coordinate(r)[axis] for r in wrong}) < mesh.sizes[axis]:
            return axis
    return None
