"""What `does-not-run` advises."""

from __future__ import annotations

import shlex

import pytest
import torch

from parallelizer.commands.main import parse
from parallelizer.simulate.checks.does_not_run import _advice, _said
from parallelizer.simulate.follow.flow import StepFailure


@pytest.mark.parametrize("path", ["", "layers.0.attention"])
def test_the_command_that_is_proposed_parses(path: str) -> None:
    advice = _advice(StepFailure(path, "forward", "aten.add.Tensor", "RuntimeError", "no"), path)
    program, words = advice.split("`")[1].split(" parallelizer ")
    assert program == "python -m"
    arguments = parse(shlex.split(words))
    assert (arguments.word, arguments.overrides) == (path, [])


def test_torchs_error_of_a_broadcast_is_told_by_the_sizes() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(8, 64, 32, device="meta") * torch.empty(8, 32, 1, device="meta")
    assert _said(str(caught.value)) == (
        "tensors of sizes [8, 64, 32] and [8, 32, 1] are combined, and dimension -2 differs"
    )
    assert _said("another error") == "another error"


def test_a_change_in_place_is_told_what_copies_the_output() -> None:
    text = "Output 0 of _ToTorchTensor is a view and is being modified inplace. This view was created inside a custom Function"
    assert "`own: true`" in _advice(
        StepFailure("a", "forward", "aten.add_.Tensor", "RuntimeError", text), "a"
    )
