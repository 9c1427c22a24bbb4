"""Compiled modules under plans: a sharded, compiled step computes what an unsharded, uncompiled one computes."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.styles.compiled_forward import compile_forward, mark_compiled, seen_from_outside
from tests.chosen import a_fifth
from tests.findings import findings, mesh_of
from tests.parity import VOCAB, Case, Errors, asked_for, assert_exact, compare, plan, token_batch, token_loss
from tests.ranks import run_ranks
from tests.runtime.test_step import llama


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(24), nn.LayerNorm(24)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=bias) for _ in range(4))
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (p(normed).unflatten(-1, (-1, 6)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Small(nn.Module):
    """Tokens to logits, by two blocks that are compiled."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 24), nn.Linear(24, VOCAB)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


STARTER = Path(__file__).resolve().parents[2] / "parallelizer/commands/new/starter"


def starter() -> nn.Module:
    """The model that `parallelizer new` writes."""
    spec = importlib.util.spec_from_file_location("my_gpt", STARTER / "my_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.MyGpt(VOCAB, 24, 4, 2, 16)
    return model


COMPILE = "{style: compile, backend: aot_eager}"
TENSOR = """
  embed: {style: rowwise, output: shard(1)}
  blocks.*.{norm,second}: {style: sequence, local: false}
  blocks.*.{q,k,v}: {style: colwise, input: shard(1)}
  blocks.*.up: {style: colwise, input: shard(1)}
  blocks.*.{o,down}: {style: rowwise, output: shard(1)}
  head: {style: colwise, input: shard(1), output: shard(-1), local: false}
"""
BIASED = Case("tp2", plan(f"rules:\n  blocks.*: {COMPILE}{TENSOR}"), {"tp": 2}, lambda: Small(True))
"""Its keys' bias has no gradient, which cannot be compared relatively."""

CASES = [
    Case("tp2 around all styles", plan(f"rules:\n  blocks.*: {COMPILE}{TENSOR}"), {"tp": 2}, Small),
    Case(
        "tp2 around the starter's packed projection",
        plan(f"extends: {STARTER / 'conf/plans/my_gpt.yaml'}\nrules: {{blocks.*: {COMPILE}}}"),
        {"tp": 2}, starter, accumulate=2,
    ),
    Case(
        "cp2 recomputed inside",
        plan(
            f"rules:\n  blocks.*: [checkpoint, context-parallel, {COMPILE}, fsdp]\n  '': fsdp\n"
            "buffers: {batch: {input_ids: 1, labels: 1}}"
        ),
        {"cp": 2}, Small,
    ),
    Case(
        "fsdp2 inside its units", plan(f"rules: {{blocks.*: [{COMPILE}, fsdp], '': fsdp}}"), {"dp_shard": 2}, Small,
        accumulate=2,
    ),
    Case(
        "tp2 inside what is recomputed",
        plan(f"rules:\n  blocks.*: checkpoint\n  blocks.*.{{up,down,o}}: {COMPILE}{TENSOR}"), {"tp": 2}, Small,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def on_2_ranks(request: pytest.FixtureRequest) -> dict[str, Errors | str]:
    return compare(asked_for(CASES, request))


@pytest.mark.ranks
@pytest.mark.parametrize("name", a_fifth(case.name for case in CASES))
def test_a_compiled_step_computes_what_one_process_does(
    name: str, on_2_ranks: dict[str, Errors | str]
) -> None:
    assert_exact(on_2_ranks[name])


@pytest.mark.ranks
@pytest.mark.slow
def test_evaluate_runs_what_a_step_has_compiled_and_what_it_has_not() -> None:
    """Separate projections with biases, whose code for a forward without gradients is another one."""
    case = BIASED
    batch = token_batch()
    with torch.device("meta"):
        plain = case.model().double()
    pz.materialize(plain, device="cpu", seed=5)
    expected = F.cross_entropy(plain(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()).item()

    def worker() -> list[float]:
        with torch.device("meta"):
            model = case.model().double()
        mesh = pz.build_mesh(Mesh(case.mesh), "cpu")
        pz.materialize(pz.apply(pz.compile(case.plan, model, mesh), model, mesh), device="cpu", seed=5)
        first = pz.evaluate(model, [batch], token_loss).item()
        pz.train_step(model, [batch], token_loss, torch.optim.SGD(model.parameters(), lr=0.0))
        return [first, pz.evaluate(model, [batch], token_loss).item()]

    for found in run_ranks(worker, 2):
        assert found == pytest.approx([expected, expected], rel=1e-11)


@pytest.mark.parametrize(
    ("text", "sizes", "code"),
    [
        ("layers.*: [checkpoint, compile]", {"tp": 2}, "compiled-region"),
        ("layers.*: [checkpoint, compile]", {"dp_shard": 2}, None),
        ("layers.*: checkpoint, layers.*.feed_forward: compile", {"tp": 2}, None),
        ("layers.*.feed_forward: checkpoint, layers.*: compile", {"tp": 2}, "compiled-region"),
        ("layers.*.feed_forward: fsdp, layers.*: compile", {"dp_shard": 2}, "compiled-region"),
        ("layers.*: [compile, fsdp]", {"dp_shard": 2}, None),
        ("layers.*: {style: compile, dynamic: true}", {"tp": 2}, "compiled-region"),
        ("layers.*: {style: compile, dynamic: true}", {"dp_shard": 2}, None),
        ("layers.*.attention_norm: {style: compile, dynamic: true}", {"tp": 2}, None),
    ],
)
def test_what_cannot_be_compiled_is_refused(text: str, sizes: dict[str, int], code: str | None) -> None:
    tensor = '"layers.*.{attention.wo,feed_forward.w2}": rowwise, "layers.*.{attention.w[qkv],feed_forward.w[13]}": colwise, '
    rules = (tensor if "tp" in sizes else '"": fsdp, ') + text
    found = findings("rules: {" + rules.replace("layers.*", '"layers.*', 0) + "}", llama(), mesh_of(**sizes))
    assert [d.code for d in found if d.severity == "error"] == ([code] if code else [])


@pytest.mark.parametrize(("given", "expected"), [({}, False), ({"dynamic": True}, True)])
def test_what_has_dtensors_gets_code_for_each_size(
    given: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    compile_forward(nn.Linear(2, 2), backend="eager")
    monkeypatch.setattr("parallelizer.styles.compiled_forward.DTensor", nn.Parameter)
    compile_forward(nn.Linear(2, 2), backend="eager", **given)
    assert asked == [{"backend": "eager"}, {"backend": "eager", "dynamic": expected}]


def test_names_signature_and_copies_stay() -> None:
    model = Small()
    names = [n for n, _ in model.named_parameters()]
    signature = inspect.signature(model.blocks[0].forward)
    compile_forward(model.blocks[0], backend="eager")
    mark_compiled(model.blocks[0])
    assert [n for n, _ in model.named_parameters()] == names
    assert inspect.signature(model.blocks[0].forward) == signature
    twin = copy.deepcopy(model.blocks[0])
    with torch.no_grad():
        twin.down.weight.zero_()
    x = torch.randn(1, 3, 24)
    assert not torch.equal(twin(x), model.blocks[0](x))
    outside = [path for path, _ in seen_from_outside(model)]
    assert "blocks.0" in outside and "blocks.1.up" in outside and "blocks.0.up" not in outside
