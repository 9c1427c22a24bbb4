"""Transformers models whose sequence is cut: their masks, positions and documents."""

from __future__ import annotations

from typing import Any

import pytest

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.hugging_face import causal_lm
from parallelizer.language.workload import Entry, Workload
from tests.findings import findings, mesh_of

pytest.importorskip("transformers", reason="the optional extra `hf`")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CP, TP = mesh_of(cp=2), mesh_of(tp=2)
EMBEDDED = "rules: {model.embed_tokens: {style: rowwise, output: shard(1)}, model.layers.*.self_attn.o_proj: rowwise}\n"
CONTEXT = 'rules: {model.layers.*.self_attn: context-parallel, "": fsdp}\n'
MADE = "buffers: {batch: {input_ids: 1, labels: 1, position_ids: positions}}\n"
LEFT_OUT = "buffers: {batch: {input_ids: 1, labels: 1}}\n"


def found(text: str, mesh: Any, attention: str = "sdpa", kind: str = "llama") -> tuple[Diagnostic, ...]:
    """Errors alone, and without a workload, as in one's own loop."""
    config = {"model_type": kind, **SIZES}
    every = findings(text, lambda: causal_lm(config=config, attention=attention), mesh)
    return tuple(d for d in every if d.severity == "error")


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@pytest.mark.parametrize(
    ("text", "mesh", "seen"),
    [(CONTEXT + MADE, CP, "one rank of cp=2 alone"), (EMBEDDED + MADE, TP, "split over tp")],
)
def test_attention_that_makes_its_own_masks_is_refused(
    attention: str, text: str, mesh: Any, seen: str
) -> None:
    [one] = found(text, mesh, attention)
    assert one.code == "attention-implementation" and one.span is not None
    assert f"`{attention}`" in one.message and seen in one.message
    assert 'set_attn_implementation("sdpa")' in (one.help or "")


def test_capped_scores_have_ours_alone() -> None:
    [one] = found(CONTEXT + MADE, CP, "eager", "gemma2")
    assert one.code == "attention-implementation" and "hugging_face.register()" in (one.help or "")


@pytest.mark.parametrize("attention", ["sdpa", "parallelizer"])
def test_sdpa_and_ours_are_fine(attention: str) -> None:
    assert found(CONTEXT + MADE, CP, attention) == found(EMBEDDED + MADE, TP, attention) == ()


def test_any_is_fine_where_every_rank_has_the_whole_sequence() -> None:
    text = EMBEDDED.replace("shard(1)", "replicate") + LEFT_OUT
    assert found(text, TP, "eager") == found(CONTEXT + LEFT_OUT, mesh_of(dp_shard=2), "eager") == ()


@pytest.mark.parametrize(("text", "mesh"), [(CONTEXT, CP), (EMBEDDED, TP)])
def test_positions_must_be_given(text: str, mesh: Any) -> None:
    [one] = found(text + LEFT_OUT, mesh)
    assert one.code == "local-positions" and "LlamaForCausalLM counts positions from 0" in one.message
    assert "add `position_ids: positions` to buffers.batch of " in (one.help or "")


def test_positions_counted_from_ids_need_not_be_given_over_tp() -> None:
    text = "rules: {bert.embeddings.word_embeddings: {style: rowwise, output: shard(1)}}\n"
    config = {"model_type": "bert", **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}}
    every = findings(text + LEFT_OUT, lambda: causal_lm(config=config, auto="AutoModelForMaskedLM"), TP)
    assert "local-positions" not in [d.code for d in every]


def test_documents_that_positions_alone_tell_are_refused() -> None:
    own = CONTEXT + LEFT_OUT.replace("labels: 1", "labels: 1, position_ids: 1")
    [one] = found(own, CP)
    assert one.code == "lost-documents" and one.span is not None and one.span.line == 2
    assert "documents: true" in (one.help or "") and "attention_mask: document-mask" in (one.help or "")
    more = "labels: 1, documents: {dim: 1, documents: true}, attention_mask: document-mask,"
    assert found(own.replace("labels: 1,", more), CP) == ()
    tp = EMBEDDED + LEFT_OUT.replace("labels: 1", "labels: 1, position_ids: 1")
    assert found(tp, TP) == ()  # every rank has all positions, and transformers may guess


def test_a_padding_mask_stays_whole() -> None:
    text = CONTEXT + MADE.replace("labels: 1", "labels: 1, attention_mask: DIM")
    [one] = found(text.replace("DIM", "1"), CP)
    assert one.code == "split-mask" and "leave attention_mask out of buffers.batch" in (one.help or "")
    assert found(text.replace("DIM", "2"), CP) == ()  # rows of a mask of four dimensions


def test_a_mask_of_documents_would_lose_a_window() -> None:
    own = CONTEXT + MADE.replace(
        "labels: 1", "labels: 1, documents: {dim: 1, documents: true}, attention_mask: document-mask"
    )
    [one] = found(own, CP, kind="mistral")
    assert one.code == "lost-window" and one.span is not None and "sliding_window=null" in (one.help or "")
    assert found(own, CP) == ()


MASK = "+model.batch.attention_mask={shape: [batch, sequence], dtype: int64, range: [0, 2]}"


@pytest.mark.parametrize("mask", [(), (MASK,)])
@pytest.mark.parametrize("preset", ["cp2", "tp2"])
def test_attention_has_the_expected_shapes_with_a_mask_of_the_batch_too(
    preset: str, mask: tuple[str, ...]
) -> None:
    """Under a mask, transformers repeats key heads before attention: in the whole model too, which is followed on meta."""
    small = [f"model.config.{key}={value}" for key, value in (("hidden_size", 64), ("intermediate_size", 64))]
    overrides = [
        "model=hf_llama",
        f"parallel={preset}",
        "train.seq_len=16",
        "train.batch_size=4",
        "device=cpu",
    ]
    found = pz.validate(pz.from_overrides([*overrides, *small, *mask]))
    assert [d for d in found if d.severity != "note"] == []


FIXED = [
    ("gpt2", "transformer.wpe.weight", 16), ("opt", "model.decoder.embed_positions.weight", 16),
    ("bart", "model.decoder.embed_positions.weight", 16), ("roberta", "roberta.embeddings.position_embeddings.weight", 15),
    ("gptj", "transformer.h.0.attn.embed_positions", 16), ("xglm", "model.embed_positions.weights", 16),
]  # fmt: skip
"""Tables of `max_position_embeddings=16`. A RoBERTa whose padding is token 0 begins at row 1."""


def of_length(tokens: int, kind: str) -> list[tuple[str, str]]:
    """The severity and message of what is said of a sequence of so many tokens."""
    entry = Entry(("batch", "sequence"), range=(0, 32))
    work = Workload({"input_ids": entry, "labels": entry}, 2, tokens)
    config: dict[str, Any] = {
        "model_type": kind, "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 16,  "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if kind in ("roberta", "bart"):
        config["is_decoder"] = True
    every = findings('rules: {"": fsdp}', lambda: causal_lm(config=config), workload=work)
    return [(d.severity, d.message) for d in every if d.code == "sequence-too-long"]


@pytest.mark.parametrize(("kind", "table", "rows"), FIXED)
def test_a_sequence_beyond_a_table_of_positions_is_refused(kind: str, table: str, rows: int) -> None:
    assert of_length(rows, kind) == []
    [(severity, message)] = of_length(rows + 1, kind)
    assert severity == "error" and message.startswith(table) and message.endswith(f"has {rows + 1}")


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_sequence_beyond_rotary_positions_is_a_warning(kind: str) -> None:
    assert of_length(16, kind) == []
    message = "the model's configuration says 16 positions, but the sequence has 17"
    assert of_length(17, kind) == [("warning", message)]
