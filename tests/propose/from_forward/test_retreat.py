"""What is refused is taken back, and said; what is not stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelizer.propose.from_forward.retreat import Retreat
from parallelizer.propose.from_forward.rules import Choice, units
from parallelizer.propose.from_forward.write_plan import write_plan
from tests.init import models
from tests.propose.from_forward.test_roles import found


class Judge:
    """Refuses what a word of the plan says, on meshes of an axis."""

    def __init__(self, word: str, axis: str, *, when_proven: bool = False) -> None:
        self.word, self.axis, self.when_proven = word, axis, when_proven
        self.unproven: str | None = None

    def refusal(self, text: str, mesh: Mapping[str, int], *, proven: bool = False) -> str | None:
        if self.axis in mesh and self.word in text and (proven or not self.when_proven):
            return f"no {self.word} here"
        return None


def settled(judge: Judge, *, prove: bool = False, **batch: str) -> tuple[Choice, tuple[str, ...], str]:
    facts = found(models.Qwen)
    trials: Any = judge

    def text(choice: Choice) -> str:
        return write_plan(facts, choice, "")

    full = Choice(frozenset(units(facts)), batch={"input_ids": "1", **batch})
    result = Retreat(facts, trials, text, lambda sentence: None).settle(full, prove=prove)
    return result.choice, result.said, text(result.choice)


def test_what_passes_is_not_touched() -> None:
    choice, said, _ = settled(Judge("nothing of this kind", "tp"))
    assert (choice.stream, choice.context, said) == ("shard(1)", True, ())


def test_a_stream_that_cannot_be_split_stays_whole_and_it_is_said_why() -> None:
    choice, said, text = settled(Judge("shard(1)", "tp"))
    assert (choice.stream, choice.context) == ("replicate", True)
    assert said == ("the stream stays whole over tp (no sequence parallelism): no shard(1) here",)
    assert "sequence, layout" not in text


def test_one_thing_that_is_refused_is_left_whole_and_the_others_are_split() -> None:
    choice, said, text = settled(Judge("packed", "tp"))
    assert "packed" not in text
    assert "core.{ask,tell,give}: colwise" in text
    assert choice.is_sharded  # the stream was split again around what is whole
    assert said == ("MLP (stack.*.gate.both, stack.*.gate.narrow) is left whole over tp: no packed here",)
    assert "prepare-io" in text


def test_context_parallelism_that_is_refused_is_left_out_with_its_buffers() -> None:
    choice, said, text = settled(Judge("context-parallel", "cp"))
    assert not choice.context
    assert "buffers" not in text
    assert said == ("there is no context parallelism: no context-parallel here",)


def test_positions_that_a_split_stream_needs_stay_without_context_parallelism() -> None:
    choice, _, text = settled(Judge("context-parallel", "cp"), where="positions")
    assert choice.is_sharded
    assert "where: positions" in text


def test_what_only_a_run_shows_is_taken_back_too() -> None:
    _, said, text = settled(Judge("packed", "tp", when_proven=True), prove=True)
    assert "packed" not in text
    assert len(said) == 1


def test_a_model_of_which_everything_is_refused_has_fsdp() -> None:
    choice, said, text = settled(Judge("rules", "tp"))
    assert not choice.units
    assert '"":' in text
    assert len(said) == len(units(found(models.Qwen)))
