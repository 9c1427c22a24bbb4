"""The one-layer model behind the pictures of docs/styles.md, and what the dry run says that a plan moves in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.compiler.compile import compile
from parallelizer.language.load import load_plan
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from parallelizer.simulate.record.trace import Recipe, Trace, trace
from parallelizer.styles.application import Program

WIDTH, HIDDEN, HEADS, TOKENS = 16, 64, 2, 32
WORKLOAD = Workload(
    {"input_ids": Entry(("batch", "sequence"), range=(0, TOKENS)), "labels": Entry(("batch", "sequence"))},
    batch_size=2,
    seq_len=8,
)


class Mlp(nn.Module):
    """Two linears with a learned slope between them: [batch, sequence, width] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Attention(nn.Module):
    """Causal attention of two heads over its input, [batch, sequence, width] to the same."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class OneLayer(nn.Module):
    """Token ids [batch, sequence] to logits [batch, sequence, tokens]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH, bias=False)
        self.attention, self.mlp = Attention(), Mlp()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.attention(self.words(input_ids))
        return self.head(self.mlp(self.norm(x)))


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the tokens' losses, and their number."""
    losses = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return losses, torch.tensor(float(batch["labels"].numel()))


def compiled(plan: Path, mesh: Mesh) -> tuple[Program, nn.Module]:
    """The plan, checked and compiled for the model."""
    with torch.device("meta"):
        model = OneLayer()
    return compile(load_plan(plan), model, mesh, workload=WORKLOAD), model


def traced(plan: Path, mesh: Mesh) -> Trace:
    """The dry run of one step of rank 0."""
    program, model = compiled(plan, mesh)
    recipe = Recipe(WORKLOAD, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), None)
    return trace(program, model, recipe, fold=False)
