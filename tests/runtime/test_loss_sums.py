"""A loss returns a sum and a number of tokens; anything else is refused at its line."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.loss_sums import loss_sums

OUTPUT, BATCH = torch.ones(2, 3), {"labels": torch.zeros(2)}


class AsObject:
    def __call__(self, output: torch.Tensor, batch: Any) -> Any:
        return None


def mean(output: torch.Tensor, batch: Any) -> Any:
    return output.mean()


@pytest.mark.parametrize("weight", [6, 6.0, torch.tensor(6), torch.tensor([6])])
def test_the_number_of_tokens_may_be_a_plain_number(weight: Any) -> None:
    total, count = loss_sums(lambda output, batch: (output.sum(), weight), OUTPUT, BATCH)
    assert (total.item(), count.item(), total.shape, count.shape) == (6.0, 6, (), ())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (mean, "the loss mean returns one number instead of two values"),
        (functools.partial(mean), "the loss mean returns one number"),
        (AsObject(), r"the loss AsObject.__call__ returns nothing"),
        (lambda o, b: o, r"returns a tensor of shape \[2, 3\] instead of two values"),
        (lambda o, b: (o.sum(), 1, 2), "returns 3 values instead of two"),
        (lambda o, b: (o, 6), r"returns a tensor of shape \[2, 3\] as the sum"),
        (lambda o, b: (6.0, 6), "returns a float as the sum"),
        (lambda o, b: (o.sum(), "six"), "returns a str as the number of tokens"),
        (lambda o, b: (o.sum(), o), r"returns a tensor of shape \[2, 3\] as the number of tokens"),
    ],
)
def test_another_result_is_refused_at_the_line_of_the_function(loss: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        loss_sums(loss, OUTPUT, BATCH)
    [found] = raised.value.diagnostics
    assert found.code == "wrong-loss"
    assert found.span is not None and found.span.file.endswith("test_loss_sums.py")


def test_a_loss_without_source_is_refused_too() -> None:
    with pytest.raises(PlanError, match="the loss max"):
        loss_sums(max, torch.ones(1), torch.zeros(1))  # type: ignore[arg-type]
