"""Ulysses among few ranks, inside a ring of many: for more ranks than there are key heads.

The W ranks stand in a grid (`part.row_and_column`) with U to a row. Each row exchanges rows of the sequence for heads;
then every rank passes its heads' keys around its column of R = W/U ranks; then the row exchanges back (as in USP; Fang
and Zhao, 2024). Nothing has to be put in another order in between. Of the 2W chunks of head-tail, the ranks
aU .. aU+U-1 of a row hold

    aU .. aU+U-1   and   2W-1-aU .. 2W-aU-U

which are two unbroken stretches: chunks a and 2R-1-a of 2R. So what a row puts together is what rank a of R holds in
head-tail order, and the ring takes it as it is. Any other order is an order of R ranks just so: each holds what a row
holds.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from parallelizer.styles.context_parallel.choice import Heads, best_degree
from parallelizer.styles.context_parallel.order import Dealt, Order
from parallelizer.styles.context_parallel.part import SequencePart
from parallelizer.styles.context_parallel.ulysses import exchanged, fits

Tensor = torch.Tensor


def chosen_degree(heads: Heads, ranks: int, degree: int | None) -> int:
    """Over how many ranks heads are dealt out. Raises ValueError for a degree that ranks or heads do not divide by."""
    if degree is None:
        return best_degree(heads, ranks)
    if degree < 1 or ranks % degree:
        raise ValueError(f"ulysses_degree={degree} does not divide the {ranks} ranks")
    if not fits(*heads, degree):
        raise ValueError(
            f"{heads.queries} query and {heads.keys} key heads cannot be dealt out to ulysses_degree={degree} ranks; "
            "both need to divide"
        )
    return degree


def orders_of_grid(order: Order, first: int, degree: int) -> tuple[Order, Order]:
    """How the row that begins with rank `first` deals out its own rows of the sequence, which stand in the order of their
    positions, over its ranks; and how the sequence is dealt out over the rows of the grid.
    """
    ranks = order.ranks // degree
    if not isinstance(order, Dealt):
        return replace(order, ranks=degree, length=None), replace(order, ranks=ranks)
    mine = order.dealt[:, first : first + degree].flatten(1)
    within = mine.argsort(1).argsort(1).view(-1, degree, order.dealt.size(2))
    between = order.dealt.reshape(len(order.dealt), ranks, -1).sort(2).values
    return replace(order, ranks=degree, length=None, dealt=within), replace(order, ranks=ranks, dealt=between)


def mask_of_row(mask: Tensor, local_rows: int, row: SequencePart, within: Order) -> Tensor:
    """The mask of all rows that the ranks of a grid's row hold, for this rank's heads: [B or 1, H or 1, rows or 1,
    columns] of this rank to [B or 1, H/U or 1, U rows or 1, columns]. No gradient.
    """
    heads = mask.chunk(row.ranks, dim=1) if mask.size(1) > 1 else [mask] * row.ranks
    if mask.size(2) != local_rows or local_rows == 1:  # one row for all
        return heads[row.rank]
    (parts,) = exchanged([heads], row)
    return within.join(parts, 2)
