"""What people do with models beside training all of them: adapters, modules used twice, parameters left out of a step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.language.plan import Mesh, Plan
from tests.parity import (
    VOCAB,
    Case,
    Errors,
    asked_for,
    assert_exact,
    compare,
    ignored_batch,
    plan,
    token_batch,
    token_loss,
)
from tests.ranks import run_ranks


class Lora(nn.Module):
    """A linear that stays as it is, and a product of two small ones that is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * self.b(self.a(x))
        return out


class Block(nn.Module):
    """A norm and two linears, by names in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"norm": nn.LayerNorm(20), "up": nn.Linear(20, 28), "down": nn.Linear(28, 20, bias=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.parts["down"](F.gelu(self.parts["up"](self.parts["norm"](x))))
        return out


class Blocks(nn.Module):
    """Tokens to logits by blocks that may be used several times."""

    def __init__(self, turns: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 20), nn.Linear(20, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.turns = turns

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(self.turns):
            for block in self.blocks:
                x = block(x)
        logits: Tensor = self.head(x)
        return logits


def adapted() -> nn.Module:
    model = Blocks().requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            block.parts[name] = Lora(block.parts[name])
    return model


class Branching(Blocks):
    """One branch is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.never = Block()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if x.shape[0] > 100:
            x = self.never(x)
        logits: Tensor = self.head(x)
        return logits


TENSOR = """
  blocks.*.parts.norm: {style: sequence, layout: stream}
  embed: {style: rowwise, output: stream}
  head: {style: colwise, input: stream, output: shard(-1), local: false}
"""
LINEARS = (
    TENSOR
    + """
  blocks.*.parts.up: {style: colwise, input: stream}
  blocks.*.parts.down: {style: rowwise, output: stream}
"""
)
ADAPTERS = (
    TENSOR
    + """
  blocks.*.parts.up: {style: prepare-input, input: {x: stream -> replicate}, local: true}
  blocks.*.parts.up.{base,b}: colwise
  blocks.*.parts.up.a: {style: replicate, grad: replicate}
  blocks.*.parts.down.{base,a}: {style: rowwise, output: stream}
  blocks.*.parts.down.b: {style: replicate, grad: GRAD}
"""
)
STREAMS = {"split": "shard(1)", "whole": "replicate"}


def under(rules: str, stream: str = "whole", more: str = "") -> Plan:
    grad = "partial" if stream == "split" else "replicate"
    return plan(f"layouts: {{stream: {STREAMS[stream]}}}\nrules:{rules.replace('GRAD', grad)}{more}")


FSDP = "\n  blocks.*: fsdp\n  '': fsdp\n"
CASES = [
    *(Case(f"tp2 adapters, stream {s}", under(ADAPTERS, s), {"tp": 2}, adapted) for s in STREAMS),
    Case("fsdp2 adapters", under(FSDP), {"dp_shard": 2}, adapted),
    Case("fsdp2 adapters recomputed", under("\n  blocks.*: [checkpoint, fsdp]\n  '': fsdp\n"), {"dp_shard": 2}, adapted),
    *(Case(f"tp2 twice, stream {s}", under(LINEARS, s), {"tp": 2}, lambda: Blocks(2)) for s in STREAMS),
    Case("tp2 twice, recomputed", under(LINEARS, "split", "\n  blocks.*: checkpoint\n"), {"tp": 2}, lambda: Blocks(2)),
    Case("fsdp2 twice", under(FSDP), {"dp_shard": 2}, lambda: Blocks(2), accumulate=2),
    Case("replicate2 twice", under(FSDP), {"dp_replicate": 2}, lambda: Blocks(2)),
    Case("fsdp2 a branch never taken", under(FSDP), {"dp_shard": 2}, Branching, accumulate=2),
    Case("fsdp2 units never run", under(FSDP + "  never: fsdp\n"), {"dp_shard": 2}, Branching, batch=ignored_batch),
    Case("fsdp2 whole and never taken", under(FSDP), {"dp_shard": 2}, Branching, options={"fsdp": {"min_size": 10**9}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def on_2_ranks(request: pytest.FixtureRequest) -> dict[str, Errors | str]:
    return compare(asked_for(CASES, request))


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_two_ranks_compute_what_one_does(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_2_ranks[name])


@pytest.mark.ranks
def test_an_adapter_added_to_a_parallel_model_is_refused_and_a_frozen_one_is_not() -> None:
    def worker() -> tuple[str, str]:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
        model = pz.parallelize(Blocks(), under(FSDP), mesh)
        up = model.blocks[0].parts["up"]
        model.blocks[0].parts["up"] = Lora(up)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(pz.PlanError) as refused:
            pz.train_step(model, token_batch(), token_loss, optimizer)
        (found,) = refused.value.diagnostics
        model.blocks[0].parts["up"].requires_grad_(False)
        pz.train_step(model, token_batch(), token_loss, optimizer)
        return found.code, found.message

    for code, message in run_ranks(worker, 2):
        assert code == "parameters-added" and "blocks.0.parts.up.{a,b}.weight" in message
