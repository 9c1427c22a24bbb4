"""The line that mixes the rows of a batch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.proof.mixed_rows import mixed_at
from tests.proof import subjects


class Rows(subjects.Mlp):
    """What it does with the hidden features is given by a function."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, input_ids: Tensor) -> Tensor:
        gate, up = self.gate_up(self.embed(input_ids)).chunk(2, dim=-1)
        return self.head(self.down(self.mix(gate * up)))


def by_row(x: Tensor) -> Tensor:
    x = x - x.mean(1, keepdim=True)
    x = x.transpose(0, 1).softmax(-1).transpose(0, 1).cumsum(1)
    return x.flatten(0, 1).square().unflatten(0, (4, 6))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)  # here


def ranked(x: Tensor) -> Tensor:
    x = x * 2
    return x.sort(dim=0).values  # here


def normed(x: Tensor) -> Tensor:
    norm = nn.BatchNorm1d(x.shape[-1], dtype=x.dtype)
    return norm(x.transpose(1, 2)).transpose(1, 2)  # here


def rolled(x: Tensor) -> Tensor:
    return x + x.roll(1, 0)  # here


def relative(x: Tensor) -> Tensor:
    return x - x[:1]  # here


def line_of(function: Callable[..., object]) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


@pytest.mark.parametrize("mix", [centred, ranked, normed, rolled, relative])
def test_the_first_line_of_a_forward_that_mixes_rows_is_found(mix: Callable[[Tensor], Tensor]) -> None:
    span = mixed_at(dataclasses.replace(subjects.mlp({"dp_shard": 2}), build=lambda: Rows(mix)))
    assert span is not None
    assert (Path(span.file).name, span.line) == (Path(__file__).name, line_of(mix))


def test_rows_that_have_nothing_to_do_with_each_other_are_mixed_nowhere() -> None:
    assert mixed_at(dataclasses.replace(subjects.mlp({"dp_shard": 2}), build=lambda: Rows(by_row))) is None


def sorted_and_back(x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    order = rows[:, 0].argsort()
    return torch.zeros_like(rows).index_copy(0, order, rows[order]).view_as(x)


def in_parts(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for part in (x[..., 0] > 0, x[..., 0] <= 0):
        result[part] = x[part] * 2
    return result


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) - x.mean(1, keepdim=True)


@pytest.mark.parametrize("mix", [sorted_and_back, in_parts, dropped])
def test_rows_whose_outputs_do_not_change_are_not_mixed(mix: Callable[[Tensor], Tensor]) -> None:
    assert mixed_at(dataclasses.replace(subjects.mlp({"dp_shard": 2}), build=lambda: Rows(mix))) is None


def contrastive(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    whole = output.mean(1)
    scores = whole @ whole.T  # here
    loss = F.cross_entropy(scores, torch.arange(len(whole)), reduction="sum")
    return loss, torch.tensor(float(len(whole)))


def test_a_line_of_the_loss_is_found() -> None:
    span = mixed_at(dataclasses.replace(subjects.mlp({"dp_shard": 2}), loss=contrastive))
    assert span is not None and span.line == line_of(contrastive)


def test_a_line_of_the_loss_is_not_asked_for_where_a_forward_differs() -> None:
    subject = dataclasses.replace(subjects.mlp({"dp_shard": 2}), loss=contrastive)
    assert mixed_at(subject, with_loss=False) is None
