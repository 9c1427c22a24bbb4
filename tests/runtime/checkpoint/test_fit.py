"""A checkpoint of something else is told in one diagnostic, before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.checkpoint.loading import load_checkpoint
from parallelizer.runtime.checkpoint.saving import save_checkpoint
from tests.runtime.checkpoint.models import Alone, gathered_state, step_alone


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model.get_parameter("layers.0.bias").requires_grad_(False)
    return adamw(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), momentum=0.9)


def buffered() -> nn.Module:
    model = Alone()
    model.register_buffer("more", torch.zeros(2))
    return model


Made = Callable[[nn.Module], torch.optim.Optimizer]
DEEP = lambda: Alone(depth=2)  # noqa: E731
WIDE = lambda: Alone(width=6)  # noqa: E731
DOUBLE = lambda: Alone(dtype=torch.float64)  # noqa: E731
HALF = lambda: Alone(dtype=torch.bfloat16)  # noqa: E731


@pytest.mark.parametrize("there, here, made, trains, code, said", [
    (Alone, DEEP, adamw, adamw, "checkpoint-mismatch", "the checkpoint has no layers.1.{weight,bias}"),
    (DEEP, Alone, adamw, adamw, "checkpoint-mismatch",
     "the checkpoint has layers.1.{weight,bias}, which the model does not have"),
    (buffered, Alone, adamw, adamw, "checkpoint-mismatch", "the checkpoint has more, which the model does not have"),
    (Alone, buffered, adamw, adamw, "checkpoint-mismatch", "the checkpoint has no more"),
    (Alone, WIDE, adamw, adamw, "checkpoint-mismatch", "the checkpoint is of another size: layers.0.weight is [4, 4], "
     "and [6, 6] in the model; layers.0.bias is [4], and [6] in the model"),
    (Alone, DOUBLE, adamw, adamw, "checkpoint-dtype",
     "the checkpoint holds float32 for layers.0.{weight,bias}, and the model float64"),
    (HALF, Alone, adamw, adamw, "checkpoint-dtype",
     "the checkpoint holds bfloat16 for layers.0.{weight,bias}, and the model float32"),
    (Alone, Alone, sgd, adamw, "checkpoint-optimizer", "the checkpoint's optimizer is SGD, and this run's AdamW"),
    (Alone, Alone, None, adamw, "checkpoint-optimizer", "the checkpoint has a model and no optimizer"),
    (Alone, Alone, frozen, adamw, "checkpoint-optimizer",
     "the checkpoint's optimizer has never trained layers.0.bias"),
    (Alone, Alone, adamw, frozen, "checkpoint-optimizer",
     "the checkpoint's optimizer trained layers.0.bias, and this run does not"),
])  # fmt: skip
def test_of_something_else(
    tmp_path: Path, there: Callable[[], nn.Module], here: Callable[[], nn.Module], made: Made | None, trains: Made,
    code: str, said: str,
) -> None:  # fmt: skip
    model = there()
    optimizer = made(model) if made else None
    if optimizer is not None:
        step_alone(model, optimizer)
    path = save_checkpoint(tmp_path, 1, model, optimizer)
    other = here()
    own = trains(other)
    before = gathered_state_of(other)
    with pytest.raises(PlanError) as error:
        load_checkpoint(path, other, own)
    [found] = error.value.diagnostics
    assert (
        (found.code, found.message) == (code, said)
        and found.help
        and found.span
        and found.span.file == str(path)
    )
    assert gathered_state_of(other) == before and not own.state


def gathered_state_of(model: nn.Module) -> dict[str, str]:
    return gathered_state(model.float() if next(model.parameters()).dtype == torch.bfloat16 else model, None)


def test_many_names_are_counted(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, Alone())
    other = Alone()
    for n in range(5):
        other.register_parameter(f"p{'abcde'[n] * (n + 1)}", nn.Parameter(torch.zeros(1)))
    with pytest.raises(PlanError) as error:
        load_checkpoint(path, other)
    assert error.value.diagnostics[0].message.count(" and 2 more") <= 1


def test_everything_that_fits_fits(tmp_path: Path) -> None:
    """A model that was never trained, one whose optimizer was made otherwise, and one with nothing but an empty buffer
    beside the checkpoint's.
    """
    model = Alone()
    path = save_checkpoint(tmp_path, 0, model, adamw(model))
    other = Alone()
    other.register_buffer("none", torch.empty(0))
    groups = [{"params": [p], "lr": 0.1} for p in reversed(list(other.parameters()))]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    load_checkpoint(path, other, optimizer)
    assert {k: v for k, v in gathered_state(other, None).items() if "none" not in k} == gathered_state(
        model, None
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.1]
    step_alone(other, optimizer)
