"""What a trial says of a plan."""

from __future__ import annotations

import re

import pytest

from parallelizer.child.in_time import NotInTime
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.propose.from_forward.trial import Deadline, Trials

GIVEN = ["model=gpt", "plan=llama", "train.batch_size=8", "train.seq_len=64"]


def trials() -> Trials:
    setup = from_config(*compose_config(GIVEN, "tests/init/conf"))
    return Trials(setup, setup.build_model())


def test_a_plan_that_holds_is_not_refused() -> None:
    assert trials().refusal('rules: {"trunk.*": fsdp, "": fsdp}', {"dp_shard": 2}) is None


def test_a_refusal_is_one_sentence_with_its_code() -> None:
    tried = trials()
    assert "[unmatched-glob]" in (tried.refusal('rules: {"nowhere": colwise, "": fsdp}', {"tp": 2}) or "")
    assert "[yaml-syntax]" in (tried.refusal("rules: {", {"tp": 2}) or "")
    # Split features that meet the whole stream: only following the step shows it.
    wrong = 'rules: {"trunk.*.think.b": colwise, "": fsdp}'
    assert tried.refusal(wrong, {"tp": 2}) is not None


def test_a_step_that_fails_names_the_line_of_the_model() -> None:
    refusal = trials().refusal(
        'rules: {"trunk.*.think.a": {style: colwise, input: replicate}, "": fsdp}', {"tp": 2}
    )
    assert refusal is not None and re.search(r", at \S*models\.py:\d+: `.*` \[does-not-run\]$", refusal), (
        refusal
    )


def test_a_refusal_of_context_parallelism_names_the_line_of_the_model_and_the_edit() -> None:
    text = 'rules: {"trunk.*.look": context-parallel, "": fsdp}\nbuffers: {batch: {input_ids: 1, labels: 1}}'
    refusal = trials().refusal(text, {"cp": 2}) or ""
    line = r", at \S*models\.py:\d+: `where = torch\.arange\(.*\)`; pass positions to forward and write "
    assert re.search(rf"{line}.* \[local-positions\]$", refusal), refusal


def test_the_same_plan_is_tried_once() -> None:
    tried = trials()
    text = 'rules: {"": fsdp}'
    first = tried.refusal(text, {"dp_shard": 2})
    tried.setup = None  # type: ignore[assignment]  # whatever is asked of it now would fail
    assert tried.refusal(text, {"dp_shard": 2}) == first


def test_nothing_is_tried_when_the_time_is_over_and_what_was_tried_is_told() -> None:
    told: list[str] = []
    setup = from_config(*compose_config(GIVEN, "tests/init/conf"))
    tried = Trials(setup, setup.build_model(), Deadline(0.0), told.append)
    with pytest.raises(NotInTime):
        tried.refusal('rules: {"": fsdp}', {"dp_shard": 2})
    assert told == ["following a step on dp_shard=2: not done in time"]
