"""Experts that are given something else than their rule says are refused before a launch."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import PlanError
from tests.simulate.setups import MIXTURES, setup_of, traced

pytest.importorskip("transformers", reason="the optional extra `hf`")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ids: top_k_weights, weights: top_k_index", "`ids: top_k_weights` is float32 [1024, 2]"),
        ("ids: hidden_states, weights: hidden_states", "`ids: hidden_states` is float32 [1024, 64]"),
        ("weights: hidden_states", "`weights: hidden_states` is float32 [1024, 64]"),
    ],
)
def test_an_argument_that_is_something_else_is_named(options: str, said: str) -> None:
    rule = f"model.layers.*.mlp.experts: {{style: experts, {options}}}"
    setup = setup_of(
        "model=hf_qwen3_moe",
        *MIXTURES["hf_qwen3_moe"],
        "parallel=fsdp2",
        "parallel.mesh.ep=2",
        f'rules=["{rule}"]',
    )
    with pytest.raises(PlanError) as caught:
        traced(setup)
    [found] = caught.value.diagnostics
    assert (found.code, found.severity) == ("does-not-run", "error")
    assert "forward of model.layers.0.mlp.experts fails" in found.message and said in found.message
    [called] = found.related
    assert called.label == "it is called here" and called.span.file.endswith("modeling_qwen3_moe.py")
    assert found.span is not None and found.span.file.startswith("<override rules=")
