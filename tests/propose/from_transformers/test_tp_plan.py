"""Entries of a merged `tp_plan`, and what each names in a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.propose.from_transformers.tp_plan import (
    TpPlanEntry,
    read_fsdp_plan,
    read_layer_lists,
    read_tp_plan,
    with_wildcards,
)
from tests.hugging_face.small import small

pytest.importorskip("transformers", reason="models of transformers are an optional extra")


def entries(model: nn.Module) -> dict[str, TpPlanEntry]:
    return {entry.key: entry for entry in read_tp_plan(model)}


def test_keys_are_merged_and_prefixed_and_name_every_layer() -> None:
    found = entries(small("qwen3"))
    assert found["model.layers.*.self_attn.q_norm"] == TpPlanEntry(
        "model.layers.*.self_attn.q_norm",
        "replicated_with_grad_allreduce",
        ("model.layers.0.self_attn.q_norm", "model.layers.1.self_attn.q_norm"),
        ("model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
    )
    assert found["lm_head"].string == "colwise_gather_output"


def test_the_embedding_is_told_as_added() -> None:
    added = [entry for entry in read_tp_plan(small("llama")) if entry.added]
    assert [(e.key, e.string, e.modules) for e in added] == [
        ("model.embed_tokens", "embedding_rowwise", ("model.embed_tokens",))
    ]


def test_a_parameter_goes_with_its_own_entry_and_not_with_its_modules() -> None:
    found = entries(small("mixtral"))
    assert found["model.layers.*.mlp.experts"].parameters == ()
    assert found["model.layers.*.mlp.experts"].modules[0] == "model.layers.0.mlp.experts"
    assert (
        found["model.layers.*.mlp.experts.gate_up_proj"].parameters[0]
        == "model.layers.0.mlp.experts.gate_up_proj"
    )
    assert found["model.layers.*.mlp.experts.gate_up_proj"].modules == ()


def test_entries_that_name_nothing_here_are_kept() -> None:
    assert not entries(small("qwen3_moe", mlp_only_layers=[]))["model.layers.*.mlp.up_proj"].matches


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None], ids=["torch's", "transformers'"])
def test_a_model_without_a_plan_is_refused(model: nn.Module | None) -> None:
    with pytest.raises(PlanError) as caught:
        read_tp_plan(model if model is not None else small("gpt2", n_embd=32, n_layer=1, n_head=2))
    (found,) = caught.value.diagnostics
    assert found.code == "no-tp-plan" and found.help is not None and "init" in found.help


def test_numbers_of_layers_alone_are_wildcards() -> None:
    assert with_wildcards("layers.10.mlp.w1") == "layers.*.mlp.w1"
    assert with_wildcards("layers.3") == "layers.*"


def test_the_data_parallel_plan_has_what_the_model_has() -> None:
    found = read_fsdp_plan(small("llama"))
    assert found["model.layers.*"] == "free_full_weight" and found["lm_head"] == "keep_full_weight"
    with torch.device("meta"):
        assert read_fsdp_plan(nn.Linear(2, 2)) == {}


def test_lists_of_layers_are_those_that_the_pipeline_plan_names() -> None:
    assert read_layer_lists(small("llama")) == {"model.layers"}
    assert read_layer_lists(small("gpt2", n_embd=32, n_layer=1, n_head=2)) == set()
    with torch.device("meta"):
        assert read_layer_lists(nn.Linear(2, 2)) == set()
