"""What the tests of the proof prove: the shipped debug model by its overrides, and a small model with what
that has not.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

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


def _meta_mlp() -> nn.Module:
    with torch.device("meta"):
        return Mlp()
