"""A data rank's part of a batch, cut into microbatches along its rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parallelizer.language.plan import Plan
from parallelizer.styles.context_parallel.order import order_of, tagged

Batch = Mapping[str, torch.Tensor]


def microbatches(batch: Batch, plan: Plan, number: int) -> list[dict[str, torch.Tensor]]:
    """`number` microbatches of equal numbers of rows, views of the batch.

    An entry has a row (dim 0) for each sequence; or it has one row, or the plan says that its dim 0 is the sequence: then
    every microbatch is given all of it. Raises ValueError if the rows do not divide, or entries have different numbers of
    rows.
    """
    rows = rows_of(batch, plan)
    if rows % number:
        raise ValueError(f"{rows} rows of a data rank cannot be cut into {number} microbatches of equal size")
    size = rows // number
    return [
        {name: _rows(tensor, rows, at * size, size) if has_rows(name, tensor, plan, rows) else tensor
         for name, tensor in batch.items()}
        for at in range(number)
    ]  # fmt: skip


def rows_of(batch: Batch, plan: Plan) -> int:
    """The number of rows of a batch. Raises ValueError if entries have different numbers of rows."""
    sizes = {n: t.size(0) for n, t in batch.items() if t.ndim and not _is_sequence_first(n, plan)}
    several = set(sizes.values()) - {1}
    if len(several) > 1:
        listed = ", ".join(f"{name} has {rows}" for name, rows in sizes.items())
        raise ValueError(
            f"the entries of the batch have different numbers of rows (dim 0): {listed}. An entry that all microbatches "
            "share has one row, or its dim 0 is declared as the sequence in the plan"
        )
    return max(several, default=1)


def has_rows(name: str, tensor: torch.Tensor, plan: Plan, rows: int) -> bool:
    """Whether an entry of a batch has a row for each of `rows` sequences."""
    return tensor.ndim > 0 and tensor.size(0) == rows and not _is_sequence_first(name, plan)


def _is_sequence_first(name: str, plan: Plan) -> bool:
    return name in plan.batch and plan.batch[name].dim == 0


def _rows(tensor: torch.Tensor, rows: int, start: int, size: int) -> torch.Tensor:
    """Some rows of an entry, which know how the sequence was dealt out."""
    order = order_of(tensor)
    part = tensor.narrow(0, start, size)
    if order is not None:
        tagged(part, order.of_rows(start, size))
    return part
