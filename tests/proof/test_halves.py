"""What the rows of a batch compute by themselves, beside what they compute together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import parallelizer as pz
from parallelizer.proof import halves
from parallelizer.proof.halves import unequal_halves
from parallelizer.proof.subject import Subject
from parallelizer.runtime.step import Loss
from tests.proof import subjects
from tests.proof.test_mixed_rows import Rows, centred, contrastive, line_of, relative
from tests.proof.test_scenes import Branching, read

Between = Callable[[Tensor], Tensor]
DATA = {"dp_shard": 2}


def subject(between: Between, mesh: Mapping[str, int] = DATA) -> Subject:
    return dataclasses.replace(subjects.mlp(mesh), build=lambda: Rows(between))


def by_row(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def over_all_ranks(x: Tensor) -> Tensor:
    total = x.sum(0)
    if dist.is_initialized():
        dist.all_reduce(total)
    return x - total / 4


def summed(x: Tensor) -> Tensor:
    return x - pz.sum_over_batch(x.sum(0)) / 4


def drawn(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def sorted_and_back(x: Tensor) -> Tensor:
    order = x.norm(dim=(1, 2)).argsort()
    return torch.tanh(x[order])[order.argsort()]


@pytest.mark.parametrize("between", [centred, relative])
def test_rows_that_are_mixed_are_an_error_at_the_line(between: Between) -> None:
    found = unequal_halves(subject(between))
    assert found is not None and (found.code, found.severity) == ("not-equal", "error")
    assert found.span is not None and found.span.line == line_of(between)


@pytest.mark.parametrize("between", [by_row, over_all_ranks, summed, drawn, sorted_and_back])
def test_what_is_right_or_cannot_be_known_is_no_error(between: Between) -> None:
    assert unequal_halves(subject(between)) is None


def test_on_other_axes_rows_may_be_mixed() -> None:
    assert unequal_halves(subject(centred, {"tp": 2})) is None


def test_a_large_model_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "WEIGHT", 1.0)
    assert unequal_halves(subject(centred)) is None


def test_a_branch_that_halves_of_a_batch_take_for_some_values_only_is_found() -> None:
    found = unequal_halves(dataclasses.replace(subjects.mlp(DATA), build=lambda: Branching(read)))
    assert found is not None and found.span is not None and found.span.line == line_of(read)


def mean_of_means(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
    return loss, torch.ones(())


def no_number(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    size = -output.square().sum()
    return size.sqrt(), torch.ones(())  # here


@pytest.mark.parametrize("loss", [mean_of_means, contrastive])
def test_a_loss_that_is_no_sum_over_rows_is_found(loss: Loss) -> None:
    found = unequal_halves(dataclasses.replace(subjects.mlp(DATA), loss=loss))
    assert found is not None and found.code == "not-equal" and found.span is not None
    assert found.span.file.endswith(".py")


@pytest.mark.parametrize("mesh", [DATA, {"tp": 2}])
def test_a_loss_that_is_no_number_is_an_error_at_its_line(mesh: Mapping[str, int]) -> None:
    found = unequal_halves(dataclasses.replace(subjects.mlp(mesh), loss=no_number))
    assert found is not None and found.code == "model-failed" and "the loss is nan" in found.message
    assert found.span is not None and found.span.line == line_of(no_number)
