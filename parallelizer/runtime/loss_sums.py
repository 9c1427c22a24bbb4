"""The return value of a loss function, as the two tensors that a step sums."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from parallelizer.compiler.observe.calling import Routed
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.runtime.load_balancing import load_balancing_loss
from parallelizer.runtime.unknown_label import unknown_label
from parallelizer.styles.sharded_logits import plain

WANTED = "return (sum of the losses of the batch's tokens, number of those tokens)"


def loss_sums(
    loss: Callable[..., Any], output: torch.Tensor, batch: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the loss: the sum of the local tokens' losses and what they weigh, both plain tensors of one number, []. A
    number that is no tensor is made one, so that a count may be a Python int. Collective where they are DTensors.

    Where the output is a `Routed`, the loss is given the logits, and the balancing loss is added for each token that counts.
    Collective over the data axes and cp then.

    Raises PlanError (`wrong-loss`), at the line of the function, for a result of another form, and `data-mismatch` on a CPU for
    a label that is no class.
    """
    if isinstance(output, Routed):
        total, weight = loss_sums(loss, output.logits, batch)
        balance = load_balancing_loss(output.router, output.top_k, output.counted)
        return total + output.coefficient * balance.to(total.dtype) * weight.detach(), weight
    try:
        result = loss(output, batch)
    except (IndexError, RuntimeError) as error:
        if unknown := unknown_label(error, output, batch):
            raise unknown from error
        raise
    if not isinstance(result, (tuple, list)):
        raise wrong_loss(loss, f"returns {_said(result)} instead of two values")
    if len(result) != 2:
        raise wrong_loss(loss, f"returns {len(result)} values instead of two")
    total, weight = result
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        raise wrong_loss(loss, f"returns {_said(total)} as the sum instead of a tensor of one number")
    if isinstance(weight, (int, float)):
        weight = torch.tensor(weight, device=total.device)
    if not isinstance(weight, torch.Tensor) or weight.numel() != 1:
        raise wrong_loss(loss, f"returns {_said(weight)} as the number of tokens instead of one number")
    return plain(total).reshape(()), plain(weight).reshape(())


def _said(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "one number" if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def wrong_loss(loss: Callable[..., Any], what: str, help_text: str = WANTED) -> PlanError:
    """The PlanError of a loss that returns something else than two sums, at the line of the function."""
    function: Any = loss
    while function is not (inside := inspect.unwrap(getattr(function, "func", function))):
        function = inside
    function = function if inspect.isroutine(function) else type(function).__call__
    name = getattr(function, "__qualname__", type(loss).__name__)
    span = None
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function)
        # Behind decorators stands the line of the `def`.
        offset = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "lambda"))), 0)
        if file:
            near = os.path.relpath(file)
            span = Span(file if near.startswith("..") else near, first + offset)
    except (OSError, TypeError):  # no file: typed in at a prompt, or not Python
        pass
    return PlanError([Diagnostic("wrong-loss", f"the loss {name} {what}", span, help_text)])
