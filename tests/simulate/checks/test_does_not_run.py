"""What `does-not-run` advises."""

from __future__ import annotations

import shlex

import pytest

from parallelizer.commands.main import parse
from parallelizer.simulate.checks.does_not_run import _advice
from parallelizer.simulate.follow.flow import StepFailure


@pytest.mark.parametrize("path", ["", "layers.0.attention"])
def test_the_command_that_is_proposed_parses(path: str) -> None:
    advice = _advice(StepFailure(path, "forward", "aten.add.Tensor", "RuntimeError", "no"), path)
    program, words = advice.split("`")[1].split(" parallelizer ")
    assert program == "python -m"
    arguments = parse(shlex.split(words))
    assert (arguments.word, arguments.overrides) == (path, [])
