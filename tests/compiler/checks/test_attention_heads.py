"""Heads must divide by tp where their projections are split."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.workload import Entry, Workload
from tests.findings import findings, mesh_of
from tests.runtime.test_step import llama
from tests.styles.context_parallel.flexible import Flexible
from tests.styles.models import FusedAttention, Mlp, around

IDS = Entry(("batch", "sequence"), range=(0, 32))
WORKLOAD = Workload({"input_ids": IDS, "labels": IDS}, 2, 8)


def test_whole_heads_are_wanted_even_where_features_divide() -> None:
    found = findings(
        "extends: llama", llama(n_heads=6, n_kv_heads=2, n_layers=3), mesh_of(tp=4), workload=WORKLOAD
    )
    assert [(d.code, d.message, d.span, d.help) for d in found] == [
        ("heads-not-divisible", "layers.0.attention.inner has 2 key-value heads, which tp=4 does not divide (2 more like it)",
         Span("mesh", 1, 4, 5), "tp can be 1, 2; or 6 with `replicate_kv: true` on the projections to keys and values"),
        ("heads-not-divisible", "layers.0.attention.inner has 6 query heads, which tp=4 does not divide (2 more like it)",
         Span("mesh", 1, 4, 5), "tp can be 1, 2, 3, 6"),
    ]  # fmt: skip
    assert found[0].related[0].label == "this rule splits its projections"


def test_heads_that_divide_are_fine() -> None:
    assert findings("extends: llama", llama(), mesh_of(tp=4), workload=WORKLOAD) == ()


def test_heads_that_are_replicated_on_purpose_are_fine() -> None:
    text = "extends: llama\nrules: {'layers.*.attention.w[kv]': {style: colwise, replicate_kv: true}}"
    model = llama(n_heads=12, n_kv_heads=2, n_layers=3)
    assert findings(text, model, mesh_of(tp=4), workload=WORKLOAD) == ()
    assert findings(text, model, mesh_of(tp=2), workload=WORKLOAD) == ()
    found = findings("extends: llama", model, mesh_of(tp=4), workload=WORKLOAD)
    assert [(d.code, d.help) for d in found] == [
        (
            "heads-not-divisible",
            "tp can be 1, 2; or 4, 6, 12 with `replicate_kv: true` on the projections to keys and values",
        )
    ]


def test_ulysses_has_the_one_key_head_that_a_rank_holds() -> None:
    text = (
        "extends: llama\nrules: {'layers.*.attention.w[kv]': {style: colwise, replicate_kv: true}, "
        "layers.*.attention.inner: {style: context-parallel, method: ulysses}}"
    )
    model = llama(n_heads=12, n_kv_heads=2, n_layers=3)
    found = findings(text, model, mesh_of(tp=4, cp=3), workload=WORKLOAD)
    (heads,) = [d.message for d in found if d.code == "heads-not-divisible"]
    assert heads.startswith(
        "layers.0.attention.inner has 2 key-value heads (4 ranks of tp share them), which ulysses"
    )


def test_any_style_that_splits_projections_counts() -> None:
    text = (
        "rules:\n  inner.qkv: {style: shard-params, params: {weight: shard(0), bias: shard(0)}, output: OUT}"
    )
    fused = around(lambda: FusedAttention(4, 2))
    found = findings(text.replace("OUT", "shard(-1)"), fused, mesh_of(tp=4), workload=WORKLOAD)
    assert [d.code for d in found] == ["heads-not-divisible"]
    gathered = findings(text.replace("OUT", "replicate"), fused, mesh_of(tp=4), workload=WORKLOAD)
    assert gathered == ()  # every rank has all heads


def test_ulysses_needs_heads_for_every_rank() -> None:
    text = "extends: llama\nrules: {layers.*.attention.inner: {style: context-parallel, method: METHOD}}"
    model = llama(n_heads=12, n_kv_heads=4, n_layers=3)
    found = findings(text.replace("METHOD", "ulysses"), model, mesh_of(tp=2, cp=4), workload=WORKLOAD)
    assert [(d.code, d.message) for d in found if d.severity == "error"] == [
        ("heads-not-divisible", "layers.0.attention.inner has 12 query heads (2 ranks of tp share them), which "
         "ulysses cannot distribute over cp=4 (2 more like it)"),
        ("heads-not-divisible", "layers.0.attention.inner has 4 key-value heads (2 ranks of tp share them), which "
         "ulysses cannot distribute over cp=4 (2 more like it)"),
    ]  # fmt: skip
    assert found[0].help is not None and "`method: all-gather`" in found[0].help
    for method, sizes in (
        ("auto", {"tp": 2, "cp": 4}),
        ("ulysses", {"tp": 2, "cp": 2}),
        ("ulysses", {"cp": 4}),
    ):
        right = findings(text.replace("METHOD", method), model, mesh_of(**sizes), workload=WORKLOAD)
        assert [d for d in right if d.severity == "error"] == []


def test_attention_that_is_left_whole_is_let_alone() -> None:
    text = "rules:\n  layers.*.feed_forward.w[13]: colwise\n  layers.*.feed_forward.w2: rowwise"
    assert findings(text, llama(n_heads=6, n_kv_heads=2), mesh_of(tp=4), workload=WORKLOAD) == ()


def test_what_is_split_only_after_attention_does_not_count() -> None:
    class Beside(nn.Module):
        """Attention over nothing but its input, then a split MLP, in one module."""

        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.attend = Mlp(), Attend()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mlp(self.attend(x))
            return y

    text = "rules: {inner.mlp.up: colwise, inner.mlp.down: rowwise}"
    assert findings(text, around(Beside), mesh_of(tp=4), workload=WORKLOAD) == ()


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)


def test_a_model_that_cannot_run_on_meta_is_not_judged() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = FusedAttention(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x) if x.sum().item() else x

    text = "rules: {inner.attention.qkv: {style: colwise, output: replicate}}"
    assert findings(text, around(Reads), mesh_of(tp=2), workload=WORKLOAD) == ()


def test_without_a_workload_heads_are_unknown() -> None:
    assert findings("extends: llama", llama(n_heads=6, n_kv_heads=2), mesh_of(tp=4)) == ()


def test_heads_of_flex_attention_count_too() -> None:
    text = "rules: {q: colwise, kv: colwise, o: rowwise, attend: {style: context-parallel, method: METHOD}}"
    workload = Workload({"input_ids": Entry(("batch", "sequence"), range=(0, 16))}, 2, 8)
    text += "\nbuffers: {batch: {input_ids: 1}}"
    said = "attend has 2 key-value heads, which ulysses cannot distribute over cp=4"
    for method, wrong in (("ulysses", True), ("auto", False)):
        found = findings(text.replace("METHOD", method), Flexible, mesh_of(cp=4), workload=workload)
        assert (said in [d.message for d in found if d.severity == "error"]) == wrong
