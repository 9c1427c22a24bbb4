"""Experts that are given something else than their rule says are refused before a launch."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.simulate.experts_misused import PARAMETERS
from tests.simulate.setups import MIXTURES, setup_of, traced

pytest.importorskip("transformers", reason="the optional extra `hf`")


def refused(options: str, *overrides: str) -> Diagnostic:
    rule = f"model.layers.*.mlp.experts: {{style: experts, {options}}}"
    mesh = ("parallel=fsdp2", "parallel.mesh.ep=2")
    setup = setup_of("model=hf_qwen3_moe", *MIXTURES["hf_qwen3_moe"], *mesh, f'rules=["{rule}"]', *overrides)
    with pytest.raises(PlanError) as caught:
        traced(setup)
    [found] = caught.value.diagnostics
    assert (found.code, found.severity) == ("does-not-run", "error")
    return found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ids: top_k_weights, weights: top_k_index", "`ids: top_k_weights` is float32 [1024, 2]"),
        ("ids: hidden_states, weights: hidden_states", "`ids: hidden_states` is float32 [1024, 64]"),
        ("weights: hidden_states", "`weights: hidden_states` is float32 [1024, 64]"),
    ],
)
def test_an_argument_that_is_something_else_is_named(options: str, said: str) -> None:
    found = refused(options)
    assert "forward of model.layers.0.mlp.experts fails" in found.message and said in found.message
    [called] = found.related
    assert called.label == "it is called here" and called.span.file.endswith("modeling_qwen3_moe.py")
    assert found.span is not None and found.span.file.startswith("<override rules=")


def test_a_dimension_that_counts_something_else_is_named() -> None:
    """As many features as experts, so that both can be divided."""
    found = refused("params: {gate_up_proj: shard(0), down_proj: shard(1)}", "model.config.hidden_size=8")
    assert found.message.startswith("the plan does not run: forward of model.layers.0.mlp.experts fails: ")
    assert found.help == PARAMETERS
    [failing] = found.related
    assert failing.label == "it fails here"
