"""A language model without attention: embedding, two MLP blocks, head. Losses are tried on it."""

import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Lm(nn.Module):
    def __init__(self, vocabulary=32, width=16, layers=2):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 2 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
