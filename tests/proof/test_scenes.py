"""Values with which a forward decides otherwise, and the proof that runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Entry, Workload
from parallelizer.proof.not_equal import not_equal
from parallelizer.proof.prove import prove_subject
from parallelizer.proof.scene import Scene
from parallelizer.proof.scenes import scenes_of
from parallelizer.proof.subject import Subject
from tests.proof import subjects
from tests.proof.test_mixed_rows import line_of


class Branching(subjects.Mlp):
    """What it does with the features between the linears is given by a function."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        torch.manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, std=0.3)

    def forward(self, input_ids: Tensor) -> Tensor:
        gate, up = self.gate_up(self.embed(input_ids)).chunk(2, dim=-1)
        return self.head(self.down(self.between(torch.tanh(gate * up))))


def largest(x: Tensor) -> Tensor:
    if (x > 0.98).any():  # here
        return x * 0.5
    return x


def read(x: Tensor) -> Tensor:
    return x * 0.5 if x.max().item() > 0.98 else x  # here


def saving(x: Tensor) -> Tensor:
    return x.clamp(max=0.98) if (x > 0.98).any() else x


def plain(x: Tensor) -> Tensor:
    return x


def subject(between: Callable[[Tensor], Tensor]) -> Subject:
    return dataclasses.replace(subjects.mlp({"tp": 2}), build=lambda: Branching(between))


@pytest.mark.parametrize("between", [largest, read])
def test_the_size_where_a_branch_turns_over_is_found_from_both_sides(
    between: Callable[[Tensor], Tensor],
) -> None:
    turning = [scene for scene in scenes_of(subject(between)) if scene.line is not None]
    assert len(turning) >= 2 and not turning[0].uneven
    above, below = turning[0].scale, turning[1].scale
    assert below < above < below * 1.001
    assert turning[0].line is not None
    assert (Path(turning[0].line.file).name, turning[0].line.line) == (Path(__file__).name, line_of(between))


def test_a_forward_that_decides_nothing_has_no_scenes() -> None:
    assert scenes_of(subject(plain)) == ()


@pytest.mark.ranks
def test_a_branch_on_the_features_of_a_rank_is_proven_only_where_both_ways_are_one() -> None:
    assert prove_subject(subject(saving)).passed
    proof = prove_subject(subject(largest))
    assert not proof.passed
    found = not_equal(proof)
    assert found.span is not None and found.span.line == line_of(largest)
    assert "a rank decides otherwise" in found.message


def test_rows_of_an_uneven_batch_end_early_and_those_of_the_halves_have_other_words() -> None:
    entries = {"ids": Entry(("batch", "sequence"), range=(1, 17)), "x": Entry(("batch", 2), "float64")}
    batch = {"ids": torch.full((4, 8), 5), "x": torch.ones(4, 2, dtype=torch.float64)}
    work = Workload(entries, 4, 8)
    uneven = Scene(2.0, uneven=True, line=Span("a.py", 1)).batch(batch, work, 4)
    assert (uneven["ids"] == 5).sum(1).tolist() == [7, 6, 5, 4]
    assert uneven["x"][:, 0].tolist() == pytest.approx([2, 2, 2 / 3, 2 / 3])
    apart = Scene(1.0, uneven=True, apart=True).batch(batch, work, 4)["ids"]
    assert apart[0, 0] == 13 and apart[3, 0] == 5
    assert (batch["ids"] == 5).all() and (batch["x"] == 1).all()
