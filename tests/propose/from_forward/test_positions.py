"""What carries the sequence: found by what it changes, and not by its name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from parallelizer.language.workload import Entry, Workload
from parallelizer.propose.from_forward.positions import carriers
from tests.findings import on_meta
from tests.init import models

WORK = Workload({"input_ids": Entry(("batch", "sequence"), range=(0, 128))}, 4, 64)


class Decoy(models.Gpt):
    """Takes other optional tensors before its positions."""

    def forward(self, input_ids: Tensor, bonus: Tensor | None = None, where: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids, where)
        return logits if bonus is None else logits + bonus[..., None]


@pytest.mark.parametrize("build", [models.Gpt, Decoy])
@pytest.mark.parametrize(
    "small", [True, False], ids=["with a small one that runs", "from fake tensors alone"]
)
def test_the_argument_that_takes_positions_is_found(build: type[nn.Module], small: bool) -> None:
    found = carriers(on_meta(build), WORK, on_meta(build) if small else None)
    assert found.input == "where"


class FirstRows(models.Gpt):
    """Takes the first rows of a table where it is given no positions."""

    def forward(self, input_ids: Tensor, where: Tensor | None = None) -> Tensor:
        rows = self.places.weight[: input_ids.shape[1]] if where is None else self.places(where)
        z = self.words(input_ids) + rows
        for block in self.trunk:
            z = block(z)
        return self.read(self.last(z))


def test_positions_are_passed_to_a_model_that_reads_the_first_rows_of_a_table() -> None:
    assert carriers(on_meta(FirstRows), WORK, on_meta(FirstRows)).input == "where"


def test_buffers_that_are_read_by_position_are_found_with_their_dimension() -> None:
    found = carriers(on_meta(models.Qwen), WORK)
    assert found.buffers == {f"stack.{n}.core.turn.{b}": 0 for n in (0, 1) for b in "cs"}
    assert found.input is None


def test_a_model_without_positions_has_none() -> None:
    entries = {**WORK.entries, "kind": Entry(("batch", "sequence"))}
    found = carriers(on_meta(models.Encoder), dataclasses.replace(WORK, entries=entries))
    assert (found.input, found.buffers) == (None, {})


def test_a_model_that_cannot_be_given_values_is_looked_at_on_fake_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no values")

    monkeypatch.setattr("parallelizer.propose.from_forward.positions.materialize", broken)
    assert carriers(on_meta(models.Gpt), WORK, on_meta(models.Gpt)).input == "where"


def test_a_sequence_of_every_length_that_the_model_has_too_says_nothing() -> None:
    assert carriers(on_meta(models.Gpt), dataclasses.replace(WORK, seq_len=2)).input is None
    assert torch.is_grad_enabled()
