"""What `init` would split of mixtures and of attention of transformers, by what their forwards do; nothing is proven here.

The figures of docs/init.md are proven by `python -m tests.init.survey`.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from parallelizer.propose.from_forward.facts import Facts
from parallelizer.propose.from_forward.observe import watch
from parallelizer.propose.from_forward.roles import roles
from parallelizer.propose.from_forward.rules import Choice, units
from parallelizer.propose.from_forward.write_plan import write_plan
from tests.init import survey


@lru_cache
def facts(name: str) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text('rules: {"": fsdp}\n')
        setup = survey.configured(name, path)
    model = setup.build_model()
    return roles(model, watch(model, setup.workload))


def share(name: str) -> float:
    """The share of the elements of all matrices that everything which was found would split."""
    found = facts(name)
    choice = Choice(frozenset(units(found)), stream="replicate", context=False)
    return survey.share(name, write_plan(found, choice, name))


def test_experts_of_grouped_products_are_split() -> None:
    assert share("mixtral") > 0.95


def test_a_bias_of_each_expert_is_added_once() -> None:
    """GPT-OSS has biases behind both products, and attention that is written out for its sinks."""
    assert share("gpt_oss") > 0.95
    once = {name.rpartition(".")[2] for region in facts("gpt_oss").regions for name in region.once}
    assert once == {"down_proj_bias"}
    carried = {name.rpartition(".")[2] for region in facts("gpt_oss").regions for name in region.carried}
    assert {"gate_up_proj_bias", "sinks"} <= carried


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "ernie4_5_moe", "llama4_text"])
def test_other_mixtures_are_split(name: str) -> None:
    assert share(name) > 0.95


@pytest.mark.slow
def test_heads_that_are_made_of_latents_are_split_and_the_latents_are_whole() -> None:
    assert share("deepseek_v3") > 0.9
    attention = next(r for r in facts("deepseek_v3").regions if r.kind == "attention")
    assert {name.rpartition(".")[2] for name in attention.sources} == {"q_b_proj", "kv_b_proj"}
    latent = {name.rpartition(".")[2] for name in attention.latent}
    assert latent == {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}


def test_attention_that_is_written_out_for_a_cap_is_seen() -> None:
    assert facts("gemma2").attentions == ("model.layers.0.self_attn", "model.layers.1.self_attn")
