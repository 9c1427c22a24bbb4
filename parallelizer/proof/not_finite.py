"""Where a loss that is not a number comes from, with a batch of drawn numbers, in the unsharded model.

The first operator that makes a NaN of numbers is written somewhere: in a line of the model or of the loss. That line is to blame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from parallelizer.child import children
from parallelizer.child.children import WorldError, in_children
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.proof.modes import Float64
from parallelizer.proof.observe import default_dtype, filled
from parallelizer.proof.subject import Subject
from parallelizer.runtime.loss_sums import loss_sums, wrong_loss
from parallelizer.runtime.step import Batch, forward
from parallelizer.torch_private import TorchDispatchMode, tree_leaves

HELP = (
    "every batch needs tokens that count in the loss: where none do, a mean divides zero by zero; return sums and counts "
    "instead. The model needs finite initial values"
)


class NotFiniteError(PlanError):
    """The unsharded run has a loss or a gradient norm that is no number, so that there is nothing to compare with."""


@dataclass(frozen=True)
class _DrawnLoss:
    """The mean loss of a batch, and the line that made a NaN."""

    loss: float
    span: Span | None


def not_finite(subject: Subject, seed: int = 0) -> Diagnostic | None:
    """The error that the loss of the unsharded model is no number, at the line that makes it so; None if it is finite, if the
    model does not run, or if it is finite with numbers between 0 and 1 in the place of those that are drawn for a batch: the
    model may rightly want such.
    """
    try:
        (found,) = in_children([(not_finite_in_here, subject, seed)])
    except (WorldError, PlanError):
        return None
    error: Diagnostic | None = found
    return error


def not_finite_in_here(subject: Subject, seed: int) -> Diagnostic | None:
    """As `not_finite`, in this process, which is a child. Raises what the model and the loss raise."""
    drawn = _try(subject, seed, between=False)
    if math.isfinite(drawn.loss) or math.isfinite(_try(subject, seed, between=True).loss):
        return None
    message = f"the loss is {drawn.loss:g} in the unsharded model, with its initial values and a batch of drawn numbers"
    span = drawn.span or wrong_loss(subject.loss, "").diagnostics[0].span
    return Diagnostic("model-failed", message, span, HELP)


def _try(subject: Subject, seed: int, between: bool) -> _DrawnLoss:
    batch: Batch = {
        name: (torch.sigmoid(tensor.double()) if between else tensor.double())
        if tensor.is_floating_point()
        else tensor
        for name, tensor in subject.batch(seed).items()
    }
    watch = _FirstNan()
    with default_dtype(torch.float64):
        model = filled(subject, seed, torch.float64)
        with torch.no_grad(), Float64(), watch:
            total, weight = loss_sums(subject.loss, forward(model, batch), batch)
    return _DrawnLoss(float(total) / float(weight) if float(weight) else math.nan, watch.span)


class _FirstNan(TorchDispatchMode):
    """Keeps the line of the first operator that makes a NaN of arguments that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.span: Span | None = None
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = not self.found and any(map(_has_nan, tree_leaves((args, kwargs))))
        result = func(*args, **kwargs)
        made_of = any(isinstance(value, torch.Tensor) for value in tree_leaves((args, kwargs)))
        if not self.found and made_of and not before and any(map(_has_nan, tree_leaves(result))):
            self.found = True
            self.span = written_here(within=children.__file__)
        return result


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())
