"""What each string becomes, for modules and for parameters, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.propose.from_transformers.imported import _watched, parsed
from parallelizer.propose.from_transformers.proposal import propose
from parallelizer.propose.from_transformers.tp_plan import TpPlanEntry
from parallelizer.propose.from_transformers.translate import translate
from parallelizer.propose.from_transformers.write_plan import write_plan
from tests.hugging_face.small import small

pytest.importorskip("transformers", reason="models of transformers are an optional extra")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.bias = nn.Parameter(torch.empty(4, 12, 8)), nn.Parameter(torch.empty(8))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden


class Attention(nn.Module):
    def __init__(self, rope: int) -> None:
        super().__init__()
        self.qk_rope_head_dim = rope
        self.down = nn.Linear(8, 12)


class Wide(nn.Embedding):
    """An embedding with a parameter more."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.extra = nn.Parameter(torch.empty(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.odd = nn.Linear(8, 8), nn.Bilinear(2, 2, 2)
        self.embedding, self.wide = nn.Embedding(8, 8), Wide()
        self.norm, self.bare = nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)
        self.experts = Experts()
        self.latent, self.straight = Attention(4), Attention(0)
        self.same = nn.Identity()


def said(key: str, string: str, others: tuple[str, ...] = ()) -> Any:
    """The style, or the reason why there is none, of one entry."""
    with torch.device("meta"):
        model = Model()
    modules = dict(model.named_modules())
    if key in modules:
        own = tuple(f"{key}.{n}" for n, _ in modules[key].named_parameters(recurse=False))
        entry = TpPlanEntry(key, string, (key,), own)
    else:
        entry = TpPlanEntry(key, string, (), (key,))
    placing = [TpPlanEntry(name, "colwise", (), (name,)) for name in others]
    rules, failed = translate(model, [entry, *placing])
    return next((r.style or r.note for r in rules if r.entry is entry), None) or failed[0].reason


PARTIAL = "local_input: true, grad: partial, output: partial -> replicate}"


@pytest.mark.parametrize(
    ("key", "string", "style"),
    [
        ("linear", "colwise", "colwise"),
        ("linear", "colwise_gather_output", "{style: colwise, output: replicate}"),
        ("linear", "colwise_rep", "{style: colwise, output: replicate}"),
        ("linear", "rowwise", "rowwise"),
        ("linear", "rowwise_split_input", "{style: rowwise, input: replicate}"),
        ("linear", "rowwise_rep", "{style: rowwise, input: replicate}"),
        ("embedding", "embedding_rowwise", "rowwise"),
        ("embedding", "embedding_colwise", "{style: colwise, output: replicate}"),
        ("wide", "embedding_rowwise",
         "{style: shard-params, params: {weight: shard(0), extra: shard(0)}, input: replicate, output: replicate}"),
        ("norm", "sequence_parallel", "{style: sequence, local: true}"),
        ("norm", "replicate", "{style: replicate, grad: replicate}"),
        ("norm", "replicated_with_grad_allreduce", "replicate"),
        ("latent.down", "mla_kv_a_proj",
         "{style: prepare-output, output: replicate, grad: partial, grad_last: qk_rope_head_dim}"),
        ("experts", "moe_tp_experts", "{style: prepare-io, input: {hidden: replicate, weights: replicate}, " + PARTIAL),
        ("same", "moe_identity_expert", "{style: prepare-input, input: {input: replicate -> partial}, local: true}"),
        ("experts", "all_reduce", "{style: prepare-output, output: partial -> replicate}"),
        ("experts.gate_up", "colwise", "{style: shard-params, params: shard(1)}"),
        ("experts.gate_up", "rowwise", "{style: shard-params, params: shard(2)}"),
        ("experts.gate_up", "packed_colwise", "{style: shard-params, params: shard(1), packed: [1, 1]}"),
        ("experts.gate_up", "packed_rowwise", "{style: shard-params, params: shard(2), packed: [1, 1]}"),
        ("experts.bias", "colwise", "{style: shard-params, params: shard(0)}"),
        ("experts.bias", "packed_colwise", "{style: shard-params, params: shard(0)}"),
        ("experts.bias", "rowwise", "{style: replicate, grad: replicate}"),
        ("embedding.weight", "embedding_colwise", "{style: shard-params, params: shard(1)}"),
    ],
)  # fmt: skip
def test_a_string_is_said_by_a_style(key: str, string: str, style: str) -> None:
    others = ("linear.weight",) if string == "all_reduce" else ()
    assert said(key, string, others) == style


@pytest.mark.parametrize(
    ("key", "string", "reason"),
    [
        ("bare", "replicated_with_grad_allreduce", "no parameters here"),
        ("experts", "local_params", "shard-params shows a module its local shards"),
        ("straight.down", "mla_kv_a_proj", "no rotary part"),
    ],
)
def test_some_need_no_rule(key: str, string: str, reason: str) -> None:
    assert reason in said(key, string)


@pytest.mark.parametrize(
    ("key", "string", "reason"),
    [
        ("linear", "grouped_gemm", "no style does what it does"),
        ("linear", "colwise_from_tomorrow", "no style does what it does"),
        ("linear", "packed_colwise", "its bias in one piece"),
        ("norm", "colwise", "has no `out_features`"),
        ("odd", "colwise", "knows nn.Linear, not Bilinear"),
        ("linear", "embedding_rowwise", "is no nn.Embedding"),
        ("linear", "mla_kv_a_proj", "no module around it has a number `qk_rope_head_dim`"),
        ("experts.bias", "moe_tp_experts", "it says nothing of a parameter"),
    ],
)
def test_what_cannot_be_said_has_a_reason(key: str, string: str, reason: str) -> None:
    assert reason in said(key, string)


def test_partial_outputs_of_sharded_parameters_have_partial_input_gradients() -> None:
    style = said("experts", "all_reduce", ("experts.gate_up",))
    assert (
        style
        == "{style: prepare-io, input: {hidden: replicate, index: replicate, weights: replicate}, " + PARTIAL
    )


def test_every_entry_that_cannot_be_said_is_a_finding_with_its_key_and_string() -> None:
    model: Any = small("llama")
    model._tp_plan = {
        **model.tp_plan,
        "model.layers.*.mlp.up_proj": "colwise_from_tomorrow",
        "model.norm": "nowise",
    }
    with pytest.raises(PlanError) as caught:
        propose(model)
    found = caught.value.diagnostics
    assert [d.code for d in found] == ["tp-plan-string"] * 2
    assert "`model.layers.*.mlp.up_proj: colwise_from_tomorrow`" in found[0].message
    assert "model.layers.0.mlp.up_proj, and 1 more" in found[0].message


def test_what_no_entry_names_is_split_with_the_heads_that_it_meets() -> None:
    entries = {"input_ids": Entry(("batch", "sequence"), range=(0, 64))}
    met = _watched(small("cohere", use_qk_norm=True), Workload(entries, 4, 16)).split
    assert met["model.layers.0.self_attn.q_norm.weight"] == 0
    (line,) = propose(small("cohere", use_qk_norm=True), split=met).sections["split"]
    assert line.glob == "model.layers.*.self_attn.{q,k}_norm.weight"
    assert line.styles == ("{style: shard-params, params: shard(0)}",)


def test_an_output_that_the_forward_changes_in_place_is_copied() -> None:
    entries = {"input_ids": Entry(("batch", "sequence"), range=(0, 64))}
    sizes = {"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1}
    changed = _watched(small("llama4_text", **sizes), Workload(entries, 4, 16)).changed
    assert "model.layers.0.feed_forward.shared_expert.down_proj" in changed
    lines = propose(small("llama4_text", **sizes), changed=changed).sections["tp_plan"]
    own = {line.glob for line in lines if line.styles == ("{style: rowwise, own: true}",)}
    assert own == {"model.layers.*.feed_forward.shared_expert.down_proj"}


def test_modules_and_parameters_that_no_entry_names_have_rules_of_their_own() -> None:
    """A glob with alternatives of both kinds is refused: those of parameters match no module."""
    model = small("llama")
    model.register_parameter("scale", nn.Parameter(torch.empty(4, device="meta")))
    model.register_module("last_norm", nn.LayerNorm(4, device="meta"))
    proposal = propose(model)
    globs = [line.glob for line in proposal.sections["whole"]]
    assert {"last_norm", "scale"} <= {*globs}
    program = compile_plan(parsed(write_plan(proposal, [])), model, Mesh({"tp": 2}))
    assert program.diagnostics == ()
