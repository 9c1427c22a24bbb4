"""What the tests of the proof prove: the shipped debug model by its overrides, and a small model with what
that has not.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.language.plan import Mesh, Plan
from parallelizer.proof.subject import Subject

VOCAB = 16


@functools.cache
def setup(*overrides: str) -> Setup:
    """The configuration that some overrides make."""
    return from_config(*compose_config(list(overrides)))


def plan(text: str) -> Plan:
    """The plan of a YAML text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(text)
        return pz.load_plan(str(path))


class Mlp(nn.Module):
    """An embedding, a fused gate and up, and a way down with a bias."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        gate, up = self.gate_up(self.embed(input_ids)).chunk(2, dim=-1)
        return self.head(self.down(F.silu(gate) * up))


class Attention(nn.Module):
    """One layer of attention without positions, every projection with a bias: that of the keys has no
    gradient but rounding, because softmax takes no notice of what is added to all scores.
    """

    def __init__(self, hidden: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        nn.init.zeros_(self.k.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (proj(x).unflatten(-1, (-1, 4)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.dropout(x + self.o(heads.transpose(1, 2).flatten(2))))


ATTENTION_PLAN = """
version: 1
rules:
  "[qkv]": colwise
  o: rowwise
"""

MLP_PLAN = """
version: 1
rules:
  gate_up: {style: colwise, packed: [1, 1]}
  down: rowwise
"""


EXPERTS = 4


class BiasedExperts(nn.Module):
    """Stacked experts with biases, every row by all of them."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up, self.up_bias = _made(EXPERTS, hidden, width), _made(EXPERTS, width)
        self.down, self.down_bias = _made(EXPERTS, width, hidden), _made(EXPERTS, hidden)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        inside = torch.einsum("bsd,edf->bsef", x, self.up) + self.up_bias
        return torch.einsum(
            "bsed,bse->bsd", torch.einsum("bsef,efd->bsed", inside.tanh(), self.down) + self.down_bias, shares
        )


class Balanced(nn.Module):
    """A router, experts, and a loss that keeps their load even, from the shares of experts in the whole batch."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.router = nn.Linear(hidden, EXPERTS, bias=False)
        self.experts = BiasedExperts(hidden, 2 * hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        scores = self.router(x).softmax(-1)
        kept = scores.topk(2, -1)
        shares = torch.zeros_like(scores).scatter(-1, kept.indices, kept.values)
        chosen = F.one_hot(kept.indices, EXPERTS).sum(-2).to(x.dtype)
        tokens = pz.sum_over_batch(x.new_tensor(x.shape[0] * x.shape[1]))
        load, wanted = (pz.sum_over_batch(t.sum((0, 1))) / tokens for t in (chosen, scores))
        return {"logits": self.head(x + self.experts(x, shares)), "balance": (load * wanted).sum()}


class Corrected(nn.Module):
    """A mixture that is balanced without a loss: experts with many tokens are chosen less, by a bias that forward changes after
    the load of the whole batch, as DeepSeek's `e_score_correction_bias`.
    """

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.router = CorrectedRouter(hidden)
        self.experts = BiasedExperts(hidden, 2 * hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        logits: Tensor = self.head(x + self.experts(x, self.router(x)))
        return logits


class CorrectedRouter(nn.Linear):
    """The share of each expert for every token; `correction` is added to the scores that choose."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, EXPERTS, bias=False)
        self.register_buffer("correction", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x).softmax(-1)
        chosen = (scores + self.correction).topk(2, -1).indices
        with torch.no_grad():
            load = pz.sum_over_batch(F.one_hot(chosen, EXPERTS).to(x.dtype).sum((0, 1, 2)))
            self.correction += 0.05 * (load.mean() - load)
        return torch.zeros_like(scores).scatter(-1, chosen, 0.25 + scores.gather(-1, chosen))


def _made(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 4)


def balanced_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens, and the balancing loss for each of them."""
    total, count = token_loss(output["logits"], batch)
    return total + 0.5 * output["balance"] * count, count


def token_batch(seed: int, rows: int = 4, tokens: int = 6) -> dict[str, Tensor]:
    """Random tokens, and labels of which every row has another number."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCAB, (2, rows, tokens), generator=generator)
    for row in range(rows):
        labels[row, : row % tokens] = -100
    return {"input_ids": ids, "labels": labels}


def token_loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over local tokens, and their number."""
    labels = batch["labels"]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def mlp(mesh: Mapping[str, int], text: str = MLP_PLAN) -> Subject:
    """The small model under a plan."""
    return Subject(
        plan=plan(text),
        mesh=Mesh(mesh),
        build=_meta_mlp,
        loss=token_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
        batch=token_batch,
        rows=4,
        seq_len=6,
        clip=0.5,
    )


def balanced(mesh: Mapping[str, int], text: str = 'rules: {"": fsdp}') -> Subject:
    """The small mixture under a plan."""
    batch = functools.partial(token_batch, tokens=8)
    return dataclasses.replace(mlp(mesh, text), build=Balanced, loss=balanced_loss, batch=batch, seq_len=8)


def corrected(mesh: Mapping[str, int]) -> Subject:
    """The small mixture whose router has a bias."""
    return dataclasses.replace(balanced(mesh), build=Corrected, loss=token_loss)


def _meta_mlp() -> nn.Module:
    with torch.device("meta"):
        return Mlp()
