"""Every trainable parameter must belong to an fsdp unit where ranks see different tokens."""

from __future__ import annotations

import pytest
from torch import nn

from parallelizer.diagnostics.diagnostic import Span
from tests.findings import finding, findings, mesh_of
from tests.runtime.test_step import llama

BATCH = "\nbuffers: {batch: {input_ids: 1, labels: 1}}"
LAYERS = "rules: {layers.*: fsdp}"


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}])
def test_what_no_unit_gathers_is_not_summed(sizes: dict[str, int]) -> None:
    found = finding(LAYERS, llama(), mesh_of(**sizes))
    axes = ", ".join(f"{a}=2" for a in sizes)
    assert found.code == "unreduced-gradients"
    assert found.message == f"no rule sums the gradients of {{tok_embeddings,norm,output}}.weight over {axes}"
    assert found.span == Span("mesh", 1, 2, 3)
    assert found.help is not None and found.help.startswith('add `"": fsdp` to the rules of ')


def test_context_parallelism_needs_a_sum_too() -> None:
    found = finding("rules: {layers.*.attention.inner: context-parallel}" + BATCH, llama(), mesh_of(cp=2))
    assert (found.code, found.message) == (
        "unreduced-gradients",
        "no rule sums the gradients of any parameter over cp=2",
    )


def test_units_around_everything_and_frozen_parameters_are_fine() -> None:
    def frozen() -> nn.Module:
        model = llama()()
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("layers."))
        return model

    assert findings('rules: {"": fsdp}', llama(), mesh_of(dp_shard=2)) == ()
    assert findings(LAYERS, frozen, mesh_of(dp_shard=2)) == ()
    assert findings("rules: {output: colwise}", llama(), mesh_of(tp=2)) == ()


def test_a_tied_parameter_counts_once() -> None:
    assert findings('rules: {"": fsdp}', llama(tie_embeddings=True), mesh_of(dp_shard=2)) == ()
