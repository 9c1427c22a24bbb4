"""Models that nobody has changed for `init`: what is proposed for them is split, and proven on ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.propose.from_forward.observe import watch
from parallelizer.propose.from_forward.retreat import Retreat
from parallelizer.propose.from_forward.roles import roles
from parallelizer.propose.from_forward.rules import Choice, units
from parallelizer.propose.from_forward.trial import Trials
from parallelizer.propose.from_forward.write_plan import write_plan
from tests.init.architectures import overrides
from tests.init.author import setup_of, written

DROPOUT = ("+model.config.dropout=0.1", "+model.tiny.config.dropout=0")
"""As its author trains it; a proof runs without."""


def test_nanogpt_counts_its_heads_by_the_width_of_its_input(tmp_path: Path) -> None:
    with written("nanogpt", tmp_path):
        setup = setup_of("nanogpt", tmp_path, *DROPOUT)
        facts = roles(model := setup.build_model(), watch(setup.build_model(), setup.workload))
        attention = next(r for r in facts.regions if r.kind == "attention")
        assert set(attention.divide["transformer.h.0.attn"]) == {"n_head", "n_embd", "x.shape[-1]"}
        # The loss is computed inside, over all logits: they are gathered first.
        assert dict(facts.heads) == {"lm_head": True}
        trials = Trials(setup, model)
        full = Choice(frozenset(units(facts)), context=False)
        settled = Retreat(facts, trials, lambda c: write_plan(facts, c, "nanoGPT")).settle(full, prove=False)
        # Ranks drop each of its own part, also in the module whose numbers are divided.
        assert "transformer.h.0.attn" in settled.choice.random and not settled.said
        sharded = write_plan(facts, settled.choice, "nanoGPT")
        assert trials.drawn(sharded) == ()
        assert trials.refusal(sharded, {"tp": 2}, proven=True) is None
        # What the comment says switches sequence parallelism off does so.
        plain = write_plan(facts, dataclasses.replace(settled.choice, random=frozenset()), "nanoGPT")
        assert "`replicate` here and for rows switches sequence parallelism off" in plain
        assert "for rows switches sequence parallelism off, without `local-random`" in sharded
        whole = plain.replace("stream: shard(1)", "stream: replicate").replace(
            "rows: shard(0)", "rows: replicate"
        )
        assert trials.refusal(whole, {"tp": 2}) is None


def test_mingpt_writes_its_attention_out(tmp_path: Path) -> None:
    """Its MLP is a lambda over modules in a dictionary, its mask a slice of a buffer."""
    with written("mingpt", tmp_path):
        setup = setup_of("mingpt", tmp_path)
        facts = roles(model := setup.build_model(), watch(setup.build_model(), setup.workload))
        assert {r.kind: set(r.sources) for r in facts.regions} == {
            "attention": {"transformer.h.0.attn.c_attn"},
            "mlp": {"transformer.h.0.mlp.c_fc"},
        }
        text = write_plan(facts, Choice(frozenset(units(facts)), context=False), "minGPT")
        assert "attn.c_attn: {style: colwise, packed: [1, 1, 1]}" in text
        assert Trials(setup, model).refusal(text, {"tp": 2}, proven=True) is None


@pytest.mark.slow
def test_nanogpt_without_flash_attention_is_split_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with written("nanogpt", tmp_path):
        source = tmp_path / "nanogpt.py"
        source.write_text(
            source.read_text().replace(
                "hasattr(torch.nn.functional, 'scaled_dot_product_attention')", "False"
            )
        )
        setup = setup_of("nanogpt", tmp_path)
        facts = roles(model := setup.build_model(), watch(setup.build_model(), setup.workload))
        text = write_plan(facts, Choice(frozenset(units(facts)), context=False), "nanoGPT")
        assert "attn.c_attn: {style: colwise, packed: [1, 1, 1]}" in text
        assert Trials(setup, model).refusal(text, {"tp": 2}, proven=True) is None


CONF = str(Path(__file__).parents[2] / "init" / "conf")


def _of(overrides: Sequence[str], tmp_path: Path) -> Setup:
    plan = tmp_path / "plan.yaml"
    plan.write_text('rules: {"": fsdp}\n')
    return from_config(*compose_config([*overrides, f"plan={plan}"], CONF))


@pytest.mark.parametrize(
    "name",
    [
        "experts in a list",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpt", "codegen", "falcon rw")),
    ],
)
def test_attention_with_a_bias_and_experts_in_a_list_are_split_and_proven(name: str, tmp_path: Path) -> None:
    alibi = "model.config={model_type: falcon, vocab_size: 256, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, "
    alibi += "alibi: true, multi_query: false, parallel_attn: false, bias: true, hidden_dropout: 0, attention_dropout: 0}"
    sizes = ["train.batch_size=8", "train.seq_len=64"]
    setup = _of(["model=hf", alibi, *sizes] if name == "falcon rw" else overrides(name), tmp_path)
    facts = roles(model := setup.build_model(), watch(setup.build_model(), setup.workload))
    assert not any("dense" in left or "proj" in left or "members" in left for left in facts.left)
    # Masks of transformers' models with attention of their own are made for the whole sequence.
    stream = "shard(1)" if name == "experts in a list" else "replicate"
    text = write_plan(facts, Choice(frozenset(units(facts)), stream=stream, context=False), name)
    assert Trials(setup, model).refusal(text, {"tp": 2}, proven=True) is None
