"""Experts are proven in float8: those that are linears of their own, that get no token too, and stacked ones."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.float8_tokens import LowPrecision, joined_groups, token_groups
from parallelizer.proof.proof import Proof
from parallelizer.proof.prove import prove as prove_setup
from parallelizer.report.text.proof import text
from parallelizer.styles.experts.expert_list import ExpertList
from parallelizer.testing import assert_equivalent
from tests.chosen import chosen, values
from tests.proof import subjects

pytest.importorskip("torchao", reason="float8 needs torchao")

WIDTH = 32
EXPERTS = 4
BUSY = 3
"""The last expert gets no token."""


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Mixture(nn.Module):
    """A token goes to the expert of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(subjects.VOCAB, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, subjects.VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        rows, chosen = x.flatten(0, 1), input_ids.flatten() % BUSY
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (of_expert,) = torch.where(chosen == number)
            made = made.index_add(0, of_expert, expert(rows[of_expert]))
        out: Tensor = self.head(x + made.view_as(x))
        return out


def prove(recipe: str, mesh: dict[str, int], *rules: str) -> Proof:
    lines = [
        f"experts.*.*: {{style: float8, recipe: {recipe}}}",
        "experts.*.up: colwise",
        "experts.*.down: rowwise",
        "'': fsdp",
        *rules,
    ]
    plan = subjects.plan("version: 1\nrules:\n" + "".join(f"  {line}\n" for line in lines))
    return assert_equivalent(Mixture, plan, mesh, loss=subjects.token_loss, batch=subjects.token_batch)


PROVEN = [
    *((recipe, {"tp": 2}) for recipe in ("tensorwise", "rowwise", "rowwise-gw-hp")),
    ("rowwise-gw-hp", {"dp_shard": 2}),
    ("rowwise-gw-hp", {"dp_shard": 2, "tp": 2}),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(PROVEN, [("rowwise-gw-hp", {"dp_shard": 2, "tp": 2})]), ids=str)
def test_experts_that_are_linears_are_proven(case: tuple[str, dict[str, int]]) -> None:
    proof = prove(*case)
    assert proof.passed and proof.proven
    assert len(proof.float8) == 2 * EXPERTS


@pytest.mark.ranks
@pytest.mark.slow
def test_they_are_proven_inside_of_checkpoints() -> None:
    assert prove("rowwise-gw-hp", {"dp_shard": 2}, "experts.*: checkpoint").passed


@pytest.mark.ranks
@pytest.mark.slow
def test_scales_of_tokens_that_cannot_be_told_apart_are_no_proof() -> None:
    with pytest.raises(PlanError, match="the tokens of ranks cannot be told apart") as raised:
        prove("rowwise", {"dp_shard": 2})
    assert "rowwise-gw-hp" in (raised.value.diagnostics[0].help or "")


MODELS = ("hf_qwen3_moe", "hf_mixtral")
MESHES = {
    "fsdp2": ("parallel=fsdp2",),
    "tp2": ("parallel=tp2",),
    "ep2 of dp_shard": ("parallel=fsdp2_ep2",),
    "ep2 of tp, whole stream": (
        "parallel=tp2", "parallel.mesh.ep=2", "++parallel.layouts.stream=replicate",
    ),
    "ep2 of tp, stream split": ("parallel=tp2", "parallel.mesh.ep=2"),
    "ep2 of cp": ("parallel=cp2", "parallel.mesh.ep=2"),
    "ep2 of fsdp4": ("parallel=fsdp4", "parallel.mesh.ep=2"),
    "ep4 of fsdp2 x tp2": ("parallel=fsdp2_ep4_tp2",),
    "pp2 x fsdp2, ep2": ("parallel=pp2_fsdp2", "parallel.mesh.ep=2"),
}  # fmt: skip
STACKED = [
    (mesh, model, recipe) for mesh in MESHES for model in MODELS for recipe in ("rowwise", "rowwise-gw-hp")
]
"""`python -m benchmarks.proofs precision` proves both models by both recipes."""
BESIDE = "{self_attn.[qkvo]_proj,mlp.experts}"
"""Attention's linears beside the experts."""


def stacked(model: str, recipe: str, *overrides: str, modules: str = BESIDE) -> Proof:
    pytest.importorskip("transformers", reason="the optional extra `hf`")
    rule = f"model.layers.*.{modules}: {{style: float8, recipe: {recipe}}}"
    return prove_setup(subjects.setup(f"model={model}", *overrides, f"rules=['{rule}']"))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("of", values(STACKED, ()), ids=" ".join)
def test_stacked_experts_are_proven_beside_attention(of: tuple[str, str, str]) -> None:
    mesh, model, recipe = of
    proof = stacked(model, recipe, *MESHES[mesh])
    assert proof.passed and proof.proven, text(proof)
    assert {one.module.rpartition(".")[2] for one in proof.float8} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "experts",
    }  # fmt: skip
    experts = [one for one in proof.float8 if one.module.endswith("experts")]
    assert all(0.01 < (one.output or 0) < 0.3 and 0.01 < (one.gradient or 0) < 0.3 for one in experts)


OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "checkpoint": ((), ("model.layers.*: checkpoint",)),
    "experts of eager": (("model.experts=eager",), ()),
    "all-gather": ((), ("model.layers.*.mlp.experts: {style: experts, dispatch: all-gather}",)),
}
"""Overrides and rules."""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_stacked_experts_are_proven_with(option: str) -> None:
    pytest.importorskip("transformers", reason="the optional extra `hf`")
    overrides, more = OPTIONS[option]
    rules = ",".join(map(repr, ("model.layers.*.mlp.experts: {style: float8, recipe: rowwise}", *more)))
    asked = ("model=hf_qwen3_moe", "parallel=fsdp2_ep2", *overrides, f"rules=[{rules}]")
    proof = prove_setup(subjects.setup(*asked))
    assert proof.passed and proof.proven, text(proof)


class GroupedExperts(nn.Module):
    """Experts as those of transformers, [experts, ...], by grouped products of rows in the order of their experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 8)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        ids, x = top_k_index.flatten(), hidden_states.flatten(0, -2)
        order = ids.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int32).index_add(
            0, ids, torch.ones_like(ids, dtype=torch.int32)
        )
        ends = counts.cumsum(0, dtype=torch.int32)
        token = order // top_k_index.size(-1)
        hidden = torch.tanh(F.grouped_mm(x[token], self.up.transpose(1, 2), offs=ends))
        made = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        weighted = made * top_k_weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, weighted).view_as(hidden_states)


class Listed(nn.Module):
    """Stacked experts behind a linear; they may be modules, in a list. A token goes to the two experts of its number."""

    def __init__(self, grouped: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(subjects.VOCAB, WIDTH)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = GroupedExperts() if grouped else ExpertList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, subjects.VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(self.embed(input_ids))
        chosen = torch.stack([input_ids % BUSY, (input_ids + 1) % BUSY], -1)
        weights = torch.tensor([0.25, 0.75], dtype=x.dtype).expand(*input_ids.shape, 2)
        out: Tensor = self.head(x + self.experts(x, chosen, weights))
        return out


SPLIT = "{style: shard-params, params: {up: shard(1), down: shard(2)}}"
SUMMED = "{style: prepare-io, input: {hidden_states: replicate}, local_input: true, output: partial -> replicate, grad: partial}"
SMALL = [
    (recipe, grouped, mesh)
    for recipe in ("rowwise", "rowwise-gw-hp")
    for grouped in (True, False)
    for mesh in ({"dp_shard": 2}, {"dp_shard": 2, "ep": 2}, {"dp_shard": 2, "tp": 2})
    if grouped or "tp" not in mesh
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(SMALL, [("rowwise", True, {"dp_shard": 2, "ep": 2})]), ids=str)
def test_stacked_experts_of_one_s_own_are_proven_beside_a_linear(
    case: tuple[str, bool, dict[str, int]],
) -> None:
    recipe, grouped, mesh = case
    rules = [f"{{style: float8, recipe: {recipe}}}", *(["experts"] if "ep" in mesh else [])]
    rules += [SPLIT, SUMMED] if "tp" in mesh else []
    lines = [
        f"experts: [{', '.join(rules)}]",
        f"before: {{style: float8, recipe: {recipe}}}",
        "'': fsdp",
    ]
    plan = subjects.plan("version: 1\nrules:\n" + "".join(f"  {line}\n" for line in lines))
    build = functools.partial(Listed, grouped)
    proof = assert_equivalent(build, plan, mesh, loss=subjects.token_loss, batch=subjects.token_batch)
    assert proof.proven
    assert [one.module for one in proof.float8] == ["before", "experts"]


def test_ranks_that_share_experts_out_bring_their_tokens_together() -> None:
    """Four ranks of data, two microbatches of one row of two tokens each, in groups of two ranks."""
    low = LowPrecision({}, 4, 2, 1, "auto", 2)
    alone = token_groups(torch.Size((8, 2)), low)
    assert alone.tolist() == [[2 * n, 2 * n + 1] for n in range(8)]
    rows = [(0, 2), (4, 6), (1, 3), (5, 7)]  # by microbatch, then by pair of ranks
    assert joined_groups(alone, low, 2).tolist() == [[2 * i, 2 * i + 1, 2 * j, 2 * j + 1] for i, j in rows]
    with pytest.raises(ValueError, match="parts of the tokens of one rank"):
        joined_groups(alone, low, 0)
