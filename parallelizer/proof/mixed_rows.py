"""Where a forward or a loss mixes the rows of a batch.

On data axes every rank has its own rows, so that a mean over the batch, a sort of its rows or a product of rows with rows has
another result there. The model is run twice; the second time half of the rows are exchanged for others. The first operator
whose result for the other half changes mixes rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from parallelizer.child import children
from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.proof.observe import default_dtype, filled
from parallelizer.proof.subject import Subject
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.pipeline.microbatches import has_rows
from parallelizer.runtime.step import forward
from parallelizer.torch_private import TorchDispatchMode, tree_leaves


def mixed_at(subject: Subject, seed: int = 0) -> Span | None:
    """The line of the user's code where rows of a batch first have to do with each other; None where none is found."""
    try:
        (found,) = in_children([(_mixed_at, subject, seed)])
    except WorldError:
        return None
    span: Span | None = found
    return span


def _mixed_at(subject: Subject, seed: int) -> Span | None:
    batch, other = subject.batch(seed), subject.batch(seed + 1)
    half = subject.rows // 2
    changed = {
        k: torch.cat([v[:half], other[k][half:]]) if has_rows(k, v, subject.plan, subject.rows) else v
        for k, v in batch.items()
    }
    seen: list[tuple[str, list[torch.Tensor]]] = []
    with default_dtype(torch.float64):
        whole = filled(subject, seed, torch.float64)
        for one, model in ((batch, copy.deepcopy(whole)), (changed, whole)):
            watch = _Rows(subject.rows, half, seen, first=one is batch)
            with torch.no_grad(), watch:
                output = forward(model, one)
                watch.in_loss = True
                if watch.mixed is None:
                    loss_sums(subject.loss, output, one)
    return watch.mixed


class _Rows(TorchDispatchMode):
    """Keeps what every operator returns in a first run, and compares with it in the second."""

    def __init__(
        self, rows: int, half: int, seen: list[tuple[str, list[torch.Tensor]]], *, first: bool
    ) -> None:
        super().__init__()
        self.rows, self.half, self.seen, self.first = rows, half, seen, first
        self.count, self.in_loss = 0, False
        self.mixed: Span | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(value, torch.Tensor) for value in tree_leaves((args, kwargs))):
            return result  # new memory may hold anything
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if self.first:
            self.seen.append((str(func), [t.detach().clone() for t in tensors]))
        elif self.mixed is None and self.count < len(self.seen):
            name, before = self.seen[self.count]
            if name != str(func) or [t.shape for t in before] != [t.shape for t in tensors]:
                self.mixed = written_here(within=children.__file__)  # another course is taken
            elif any(not self._alike(a, b) for a, b in zip(before, tensors, strict=True)):
                self.mixed = written_here(within=children.__file__)
        self.count += 1
        return result

    def _alike(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """Whether the rows that were not exchanged are as they were, along whatever dimension counts rows."""
        if now.ndim == 0 and self.in_loss:
            return True  # a loss is a sum over rows; whether its sums add up, validation has seen
        if _equal(before, now):
            return True
        sizes = [
            (dim, size // self.rows * self.half)
            for dim, size in enumerate(now.shape)
            if size % self.rows == 0
        ]
        return any(_equal(before.narrow(dim, 0, n), now.narrow(dim, 0, n)) for dim, n in sizes if n)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for rounding: a product of matrices may add up in another order for other values beside them."""
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)
