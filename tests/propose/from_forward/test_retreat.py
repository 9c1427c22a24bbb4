"""What is refused is taken back, and said; what is not stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from parallelizer.child.in_time import NotInTime
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
        self.repeated: tuple[str, ...] = ()
        self.followed: set[str] = set()

    def drawn(self, text: str) -> tuple[str, ...]:
        return self.repeated if "local-random" not in text and text in self.followed else ()

    def refusal(self, text: str, mesh: Mapping[str, int], *, proven: bool = False) -> str | None:
        if not proven:
            self.followed.add(text)
        if self.axis in mesh and self.word in text and (proven or not self.when_proven):
            return f"no {self.word} here"
        return None


def settled(judge: Judge, *, prove: bool = False, **batch: str) -> tuple[Choice, tuple[str, ...], str]:
    facts = found(models.Qwen)
    trials: Any = judge

    def text(choice: Choice) -> str:
        return write_plan(facts, choice, "")

    full = Choice(frozenset(units(facts)), batch={"input_ids": "1", **batch})
    result = Retreat(facts, trials, text).settle(full, prove=prove)
    return result.choice, result.said, text(result.choice)


def test_what_passes_is_not_touched() -> None:
    choice, said, _ = settled(Judge("nothing of this kind", "tp"))
    assert (choice.stream, choice.context, said) == ("shard(1)", True, ())


def test_a_stream_that_cannot_be_split_stays_whole_and_it_is_said_why() -> None:
    choice, said, text = settled(Judge("shard(1)", "tp"))
    assert (choice.stream, choice.context) == ("replicate", True)
    assert said == ("the stream is not split over tp (no sequence parallelism): no shard(1) here",)
    assert "sequence, layout" not in text


def test_one_thing_that_is_refused_is_left_whole_and_the_others_are_split() -> None:
    choice, said, text = settled(Judge("packed", "tp"))
    assert "packed" not in text
    assert "core.{ask,tell,give}: colwise" in text
    assert choice.is_sharded  # the stream was split again around what is whole
    assert said == ("MLP (stack.*.gate.both, stack.*.gate.narrow) is not split over tp: no packed here",)
    assert "prepare-io" in text


def test_context_parallelism_that_is_refused_is_left_out_with_its_buffers() -> None:
    choice, said, text = settled(Judge("rules", "cp"))
    assert not choice.context and not choice.gathered
    assert choice.is_sharded
    assert "buffers" not in text
    assert said == (
        "there is no context parallelism: no rules here; nor split inside the model: no rules here",
    )


def test_a_batch_that_cannot_be_split_is_split_inside_the_model() -> None:
    choice, said, text = settled(Judge("input_ids: 1", "cp"))
    assert choice.gathered == "attention" and not choice.is_sharded
    assert "axis: cp" in text and "input_ids" not in text
    assert said == (
        "the stream is not split over tp (no sequence parallelism): over cp it is split inside the model",
        "over cp every rank computes stack.*.core with the whole sequence, which is gathered there, and splits the rest of the "
        "blocks: no input_ids: 1 here",
    )


def test_calls_of_attention_stay_exact_inside_the_model_if_that_is_proven() -> None:
    choice, said, text = settled(Judge("input_ids: 1", "cp"), prove=True)
    assert choice.gathered == "exact" and "context-parallel" in text
    assert said[-1].startswith(
        "over cp every rank has the whole batch, and only the blocks compute a part of the sequence: "
    )
    gathers, _, _ = settled(Judge("context-parallel", "cp", when_proven=True), prove=True)
    assert gathers.gathered == "attention"


class Drawing(Judge):
    """Dropout that is the same on every rank, as long as the plan does not say otherwise."""

    def drawn(self, text: str) -> tuple[str, ...]:
        return () if "local-random" in text else ("stack.0.core",)


def test_modules_draw_numbers_of_their_own_also_where_only_a_proof_splits_inside_the_model() -> None:
    choice, _, text = settled(Drawing("input_ids: 1", "cp", when_proven=True), prove=True)
    assert choice.gathered and choice.random == {"stack.0.core"} and "local-random" in text


class Uncompared(Judge):
    """Its unsharded run on the batch of a mesh with cp says nothing."""

    def refusal(self, text: str, mesh: Mapping[str, int], *, proven: bool = False) -> str | None:
        if proven and "cp" in mesh:
            self.unproven = "it does not repeat"
        return super().refusal(text, mesh, proven=proven)


def test_a_split_inside_the_model_that_cannot_be_compared_does_not_cost_the_rest_its_proof() -> None:
    facts = found(models.Qwen)
    trials: Any = Uncompared("input_ids: 1", "cp")
    full = Choice(frozenset(units(facts)), batch={"input_ids": "1"})
    settled = Retreat(facts, trials, lambda c: write_plan(facts, c, "")).settle(full, prove=True)
    assert settled.doubt is None and not settled.choice.gathered and settled.choice.is_sharded
    assert settled.said[-1].endswith("nor split inside the model: it does not repeat")


def test_a_split_inside_the_model_that_is_not_proven_is_taken_back_and_the_stream_is_split_again() -> None:
    choice, said, text = settled(Judge("rules", "cp", when_proven=True), prove=True)
    assert (choice.context, choice.gathered, choice.stream) == (False, "", "shard(1)")
    assert "axis: cp" not in text
    assert len(said) == 1 and said[0].startswith("there is no context parallelism: ")


def test_positions_that_a_split_stream_needs_stay_without_context_parallelism() -> None:
    choice, _, text = settled(Judge("rules", "cp"), where="positions")
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


class Slow(Judge):
    """Has time for so many trials."""

    def __init__(self, trials: int, word: str = "nothing of this kind", *, when_proven: bool = False) -> None:
        super().__init__(word, "tp")
        self.left, self.of_proofs = trials, when_proven

    def refusal(self, text: str, mesh: Mapping[str, int], *, proven: bool = False) -> str | None:
        if not self.of_proofs or proven:
            self.left -= 1
        if self.left < 0:
            raise NotInTime("over")
        return super().refusal(text, mesh, proven=proven)


def test_what_there_was_no_time_for_is_left_out_and_said() -> None:
    choice, said, text = settled(Slow(0))
    assert not choice.units and not choice.context
    assert '"":' in text and "colwise" not in text
    assert said[0].startswith("the time limit was reached; not tried: attention (stack.*.core.")
    assert said[0].endswith(", context parallelism")


def test_what_has_validated_before_the_time_is_over_stays() -> None:
    # Refused on both axes, and with the stream split; then the time is over as one thing is added to another.
    choice, said, _ = settled(Slow(7, "packed"))
    assert choice.units and not choice.context
    assert "; not tried: " in said[-1]


def test_a_plan_that_there_was_no_time_to_prove_is_not_proven() -> None:
    facts = found(models.Qwen)
    trials: Any = Slow(0, when_proven=True)
    full = Choice(frozenset(units(facts)), batch={"input_ids": "1"})
    result = Retreat(facts, trials, lambda choice: write_plan(facts, choice, "")).settle(full, prove=True)
    assert result.choice == full
    assert result.doubt is not None and "--seconds" in result.doubt


def test_a_plan_whose_last_proof_fails_is_in_doubt() -> None:
    facts = found(models.Qwen)
    trials: Any = Judge("rules", "dp_shard")
    full = Choice(frozenset(units(facts)), batch={"input_ids": "1"})
    result = Retreat(facts, trials, lambda choice: write_plan(facts, choice, "")).settle(full, prove=True)
    assert result.doubt == "on dp_shard=2 x tp=2 it does not hold: no rules here"


def test_fsdp_units_of_embedding_and_head_that_fail_on_data_ranks_are_taken_back() -> None:
    choice, said, text = settled(Judge("reshard_after_forward", "dp_shard", when_proven=True), prove=True)
    assert not choice.apart and "reshard_after_forward" not in text
    assert said == (
        "embedding and head are in the root's fsdp unit: on dp_shard=2 x tp=2 it does not hold: "
        "no reshard_after_forward here",
    )


def test_logits_stay_as_they_lie_where_the_loss_takes_them_so() -> None:
    _, said, text = settled(Judge("nothing of this kind", "tp"))
    assert "output: shard(-1), local: false" in text and not said


def test_logits_that_are_refused_as_they_lie_are_gathered_and_it_is_said_why() -> None:
    choice, said, text = settled(Judge("local: false", "tp"))
    assert choice.is_sharded and choice.units == frozenset(units(found(models.Qwen)))
    assert "{style: colwise, input: stream, output: replicate}" in text
    assert said == ("every rank of tp holds all logits: no local: false here",)


def test_dropout_that_would_repeat_is_drawn_apart() -> None:
    judge = Judge("nothing of this kind", "tp")
    judge.repeated = ("stack.0.core", "stack.1.core")
    choice, said, text = settled(judge)
    assert choice.random == {"stack.0.core", "stack.1.core"} and not said
    assert re.search(r"stack\.\*\.core:.*?- local-random", text, re.S)


def test_dropout_is_drawn_apart_also_where_context_parallelism_is_refused() -> None:
    judge = Judge("context-parallel", "cp")
    judge.repeated = ("stack.0.core", "stack.1.core")
    choice, _, text = settled(judge)
    assert not choice.context and choice.random == {"stack.0.core", "stack.1.core"}
    assert "local-random" in text and "context-parallel" not in text


def test_random_numbers_apart_that_are_refused_are_left_out_and_said() -> None:
    judge = Judge("local-random", "tp")
    judge.repeated = ("stack.0.core",)
    choice, said, text = settled(judge)
    assert "local-random" not in text and choice.is_sharded
    assert said == (
        "dropout in stack.*.core is the same on every rank of tp, for other parts [equal-random]: no local-random here",
    )
