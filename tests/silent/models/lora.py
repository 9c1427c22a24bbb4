"""Adapters of low rank beside frozen linears."""

import torch.nn.functional as F
from torch import nn


class Lora(nn.Module):
    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.b(self.a(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = Lora(width, 2 * width), Lora(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Adapted(nn.Module):
    def __init__(self, vocabulary=32, width=16, layers=2):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
