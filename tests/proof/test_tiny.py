"""The tiny form of a configuration."""

from __future__ import annotations

import pytest

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.tiny import shrink


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["parallel=pp4"], 4),
        (["parallel=pp4", "parallel.mesh.pp=8", "parallel.mesh.tp=2"], 4),
        (["parallel=pp4", "parallel.mesh.tp=2", "parallel.mesh.dp_shard=2"], 2),
    ],
)
def test_stages_between_the_first_and_the_last_are_proven_where_few_ranks_are_enough(
    words: list[str], ranks: int
) -> None:
    assert shrink(from_overrides([*words, "model.n_layers=8"]))[0].mesh.sizes["pp"] == ranks


def test_the_layers_of_each_stage_are_those_of_the_run_if_the_model_is() -> None:
    words = ["parallel=pp2", "++parallel.pipeline.balance=[1,3]", "model.n_layers=4"]
    small, changes = shrink(from_overrides([*words, "~model.tiny"]))
    assert small.pipeline is not None and list(small.pipeline.balance) == [1, 3]
    assert not [c for c in changes if "balance" in c]
    other, changes = shrink(from_overrides(words))
    assert other.pipeline is not None and isinstance(other.pipeline.balance, str)
    assert [c for c in changes if c.startswith("pipeline.balance [1, 3] ->")]


def test_a_rule_that_names_layers_which_the_tiny_form_has_not_is_no_mistake_there() -> None:
    rule = 'rules=["layers.{0,1,5}.ffn_norm: sequence"]'
    setup = from_overrides(["parallel=tp2", "model.n_layers=6", "++model.tiny.n_layers=2", rule])
    assert setup.compile(setup.build_model())
    small, _ = shrink(setup)
    assert small.compile(small.build_model())
    with pytest.raises(PlanError):  # the real one has to have them
        wrong = from_overrides(["parallel=tp2", "model.n_layers=6", rule.replace("5", "7")])
        wrong.compile(wrong.build_model())


@pytest.mark.parametrize(
    ("parallel", "length", "small"),
    [
        ("cp2_tp2", 254, 11),  # padded
        ("cp2_tp2", 256, 24),  # four parts of an even number of tokens
        ("cp2_tp2", 252, 12),  # of an odd number
        ("fsdp2", 256, 12),
        ("cp2", 20, 20),
    ],
)
def test_the_length_divides_as_the_runs_does(parallel: str, length: int, small: int) -> None:
    setup = from_overrides([f"parallel={parallel}", f"train.seq_len={length}"])
    assert shrink(setup)[0].workload.seq_len == small
