"""A ViT: a class token and 16 patches, 17 tokens."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = self.ln1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class Vit(nn.Module):
    def __init__(self, dim=16, heads=4, depth=2, classes=8):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 2, 2)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 17, dim) * 0.5)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class MeanVit(Vit):
    """Classifies the mean over all tokens."""

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.pos[:, 1:] + self.cls
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class FirstVit(Vit):
    """Classifies the first patch."""

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.pos[:, 1:] + self.cls
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
