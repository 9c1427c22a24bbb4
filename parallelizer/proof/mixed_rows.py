"""Where a forward or a loss mixes the rows of a batch.

On data axes every rank has its own rows, so that a mean over the batch, a sort of its rows or a product of rows with rows has
another result there. The model is run twice; the second time half of the rows are exchanged for others. The first operator
whose result for the other half changes mixes rows. Each half is exchanged: a first row that all rows are compared with changes
no rows before it. A forward whose output for the other half does not change has mixed nothing, whatever it did in between:
experts sort the tokens of all rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from parallelizer.child import children
from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.proof.modes import Float64
from parallelizer.proof.observe import default_dtype, filled
from parallelizer.proof.subject import Subject
from parallelizer.runtime.loss_sums import loss_sums
from parallelizer.runtime.pipeline.microbatches import has_rows
from parallelizer.runtime.step import Batch, outcome_for_loss
from parallelizer.torch_private import TorchDispatchMode, tree_leaves


def mixed_at(subject: Subject, seed: int = 0, *, with_loss: bool = True) -> Span | None:
    """The line of the user's code where rows of a batch first have to do with each other; None where none is found, and for a
    model that draws random numbers. Without `with_loss`, lines of the loss are left out.
    """
    try:
        (found,) = in_children([(mixed_in_here, subject, seed, with_loss)])
    except WorldError:
        return None
    span: Span | None = found
    return span


def mixed_in_here(subject: Subject, seed: int, with_loss: bool = True) -> Span | None:
    """As `mixed_at`, in this process, which is a child. Raises what the model and the loss raise."""
    batch, other = _lifted(subject.batch(seed)), _lifted(subject.batch(seed + 1))
    half = subject.rows // 2
    with default_dtype(torch.float64):
        whole = filled(subject, seed, torch.float64)
        if _draws(whole, batch):
            return None
        for kept in (slice(0, half), slice(half, subject.rows)):
            changed = {k: _with_rows(other[k], v, kept) if has_rows(k, v, subject.plan, subject.rows) else v
                       for k, v in batch.items()}  # fmt: skip
            span = _changed_at(subject, copy.deepcopy(whole), batch, changed, kept, with_loss)
            if span is not None:
                return span
    return None


def _draws(model: nn.Module, batch: Batch) -> bool:
    """Whether two runs with other random numbers have other outputs."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad(), Float64():
            made.append(_tensors(outcome_for_loss(copy.deepcopy(model), batch)))
    return not all(map(_equal, *made))


def _lifted(batch: Batch) -> Batch:
    """Its floating-point entries in float64, as the model is."""
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def _with_rows(tensor: torch.Tensor, other: torch.Tensor, rows: slice) -> torch.Tensor:
    """A copy of a tensor with some rows of another."""
    result = tensor.clone()
    result[rows] = other[rows]
    return result


def _changed_at(
    subject: Subject, model: nn.Module, batch: Batch, changed: Batch, kept: slice, with_loss: bool
) -> Span | None:
    """The line whose result for the rows that two batches share is not the same."""
    seen: tuple[list[_Seen], list[_Seen]] = [], []
    outputs: list[list[torch.Tensor]] = []
    for one, copied in ((batch, copy.deepcopy(model)), (changed, model)):
        forward, loss = (
            _Rows(subject.rows, kept, done, first=one is batch, in_loss=bool(place))
            for place, done in enumerate(seen)
        )
        with torch.no_grad(), Float64():
            with forward:
                output = outcome_for_loss(copied, one)
            outputs.append(_tensors(output))
            if with_loss:
                with loss:
                    loss_sums(subject.loss, output, one)
    if all(map(forward.alike, *outputs)):
        return loss.mixed
    return forward.mixed


def _tensors(output: Any) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tree_leaves(output) if isinstance(t, torch.Tensor)]


_Seen = tuple[str, list[torch.Tensor]]
"""An operator, and what it returned."""


class _Rows(TorchDispatchMode):
    """Keeps what every operator returns in a first run, and compares with it in the second."""

    def __init__(self, rows: int, kept: slice, seen: list[_Seen], *, first: bool, in_loss: bool) -> None:
        super().__init__()
        self.rows, self.kept, self.seen, self.first, self.in_loss = rows, kept, seen, first, in_loss
        self.count = 0
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
            elif any(not self.alike(a, b) for a, b in zip(before, tensors, strict=True)):
                self.mixed = written_here(within=children.__file__)
        self.count += 1
        return result

    def alike(self, before: torch.Tensor, now: torch.Tensor) -> bool:
        """Whether the rows that were not exchanged are as they were, along whatever dimension counts rows."""
        if now.ndim == 0 and self.in_loss:
            return True  # a loss is a sum over rows; whether its sums add up, validation has seen
        if _equal(before, now):
            return True
        return any(
            _equal(_narrowed(before, dim, kept), _narrowed(now, dim, kept))
            for dim, size in enumerate(now.shape)
            if size and size % self.rows == 0
            for kept in [slice(*(size // self.rows * at for at in (self.kept.start, self.kept.stop)))]
        )


def _narrowed(tensor: torch.Tensor, dim: int, rows: slice) -> torch.Tensor:
    return tensor.narrow(dim, rows.start, rows.stop - rows.start)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for rounding: a product of matrices may add up in another order for other values beside them."""
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)
