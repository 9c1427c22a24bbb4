"""The tiny form of a configuration."""

from __future__ import annotations

import pytest

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.tiny import shrink


def test_a_rule_that_names_layers_which_the_tiny_form_has_not_is_no_mistake_there() -> None:
    rule = 'rules=["layers.{0,1,5}.ffn_norm: sequence"]'
    setup = from_overrides(["parallel=tp2", "model.n_layers=6", "++model.tiny.n_layers=2", rule])
    assert setup.compile(setup.build_model())
    small, _ = shrink(setup)
    assert small.compile(small.build_model())
    with pytest.raises(PlanError):  # the real one has to have them
        wrong = from_overrides(["parallel=tp2", "model.n_layers=6", rule.replace("5", "7")])
        wrong.compile(wrong.build_model())


@pytest.mark.parametrize(("length", "padded"), [(254, True), (256, False)])
def test_a_length_that_the_run_pads_is_padded_in_the_tiny_form(length: int, padded: bool) -> None:
    setup = from_overrides(["parallel=cp2_tp2", f"train.seq_len={length}"])
    small, _ = shrink(setup)
    assert (small.workload.seq_len % 4 != 0) == padded
