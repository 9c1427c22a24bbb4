"""Programs with equal facts are followed once: the facts have all that the followed step depends on."""

from __future__ import annotations

import pytest

from parallelizer.child.shared_calls import SharedCalls
from parallelizer.compiler.observe.equal_layers import longest_run
from parallelizer.configuration.validate import validated, validating
from parallelizer.simulate.follow.flow import followed_facts
from tests.simulate.setups import CHECKPOINT, llama

TP2 = ("parallel=tp2", "train.batch_size=4")


def _facts(*overrides: str) -> object:
    setup = llama(*overrides)
    model = setup.build_model()
    program = setup.compile(model)
    return followed_facts(program, setup.workload), longest_run(program, model)


def test_what_no_tensor_axis_sees_leaves_the_facts_equal() -> None:
    one = _facts(*TP2)
    assert one == _facts(*TP2, CHECKPOINT.format("layers"))
    assert one == _facts("parallel=fsdp2_tp2", "train.batch_size=8")


@pytest.mark.parametrize(
    "other",
    [
        ("parallel=tp4", "train.batch_size=4", "model.n_kv_heads=4"),
        (*TP2, "+parallel.layouts.stream=replicate"),
        (*TP2, "train.seq_len=64"),
        ("parallel=tp2", "train.batch_size=8"),
        (*TP2, "model.n_layers=9"),
        (*TP2, 'rules=["layers.*.attention.wo: {style: rowwise, output: replicate}"]'),
    ],
    ids=["tp", "stream", "sequence", "rows", "layers", "rule"],
)
def test_what_the_step_depends_on_makes_other_facts(other: tuple[str, ...]) -> None:
    assert _facts(*TP2) != _facts(*other)


@pytest.mark.slow
def test_shared_steps_find_what_steps_of_their_own_find() -> None:
    overrides = ("parallel=fsdp2_tp2", "rules=['layers.*.attention.wo: {style: rowwise, output: shard(1)}']")
    several = (overrides, (*overrides, "train.accumulate=2", "train.batch_size=16"))
    with SharedCalls() as calls:
        for one in several:
            setup = llama(*one)
            model = setup.build_model()
            program = setup.compile(model)
            alone = validated(setup, program, model, classes=True)
            with validating(setup, program, model, classes=True, shared=calls) as finish:
                together = finish()
            assert [d.message for d in together.found] == [d.message for d in alone.found]
            assert together.trace == alone.trace
        assert len(calls._calls) == 2  # one step was followed, and one forward for its statistics
