"""Mixtures of experts by hand: looped and batched, with and without balancing."""

import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Looped(nn.Module):
    """Top-2 routing, one expert after another."""

    def __init__(self, width, hidden, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x):
        probability = self.router(x).softmax(-1)
        weight, chosen = probability.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, token, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                out = out.index_put(
                    (row, token),
                    expert(x[row, token]) * weight[row, token, place].unsqueeze(-1),
                    accumulate=True,
                )
        return out, probability, chosen


class Batched(nn.Module):
    """All experts see all tokens; weights of those that are not chosen are 0."""

    def __init__(self, width, hidden, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 4)

    def forward(self, x):
        probability = self.router(x).softmax(-1)
        weight, chosen = probability.topk(2, -1)
        gates = torch.zeros_like(probability).scatter(-1, chosen, weight)
        h = F.silu(torch.einsum("bsd,edh->besh", x, self.up))
        y = torch.einsum("besh,ehd->besd", h, self.down)
        return torch.einsum("besd,bse->bsd", y, gates), probability, chosen


KINDS = {"looped": Looped, "batched": Batched}


class Block(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(width), KINDS[kind](width, 2 * width)

    def forward(self, x):
        y, probability, chosen = self.moe(self.norm(x))
        return x + y, probability, chosen


class Moe(nn.Module):
    """Returns logits alone."""

    def __init__(self, vocabulary=32, width=16, layers=2, kind="looped"):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, kind) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x, _, _ = block(x)
        return self.head(x)


class Balanced(Moe):
    """Returns logits and the balancing loss, a product of means over tokens."""

    def forward(self, input_ids):
        x, balance = self.embed(input_ids), 0.0
        for block in self.blocks:
            x, probability, chosen = block(x)
            share = F.one_hot(chosen, probability.shape[-1]).to(x.dtype).sum(2).mean((0, 1))
            balance = balance + (share * probability.mean((0, 1))).sum() * probability.shape[-1]
        return self.head(x), balance


class BalancedByRow(Moe):
    """The balancing loss of each row by itself."""

    def forward(self, input_ids):
        x, balance = self.embed(input_ids), 0.0
        for block in self.blocks:
            x, probability, chosen = block(x)
            share = F.one_hot(chosen, probability.shape[-1]).to(x.dtype).sum(2).mean(1)
            balance = balance + (share * probability.mean(1)).sum(-1) * probability.shape[-1]
        return self.head(x), balance


def balanced(output, batch):
    logits, balance = output
    labels = batch["labels"]
    count = (labels != -100).sum()
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total + 0.1 * balance * count, count


def balanced_rows(output, batch):
    """Means of rows, and the rows' balancing losses."""
    logits, balance = output
    tokens = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none")
    return (tokens.mean(1) + 0.1 * balance).sum(), len(tokens)
