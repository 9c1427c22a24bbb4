"""A GPT with a fused qkv projection, and ten layers of which one is unlike the others."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, -1, self.head_dim).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class ByHand(Attention):
    """Attention as plain operations, with a mask of its own."""

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, -1, self.head_dim).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Windowed(Attention):
    """The mask is of the local length, and a window."""

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, -1, self.head_dim).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        place = torch.arange(length)
        mask = (place[:, None] >= place) & (place[:, None] - place < 5)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, attention=Attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


ATTENTIONS = {"sdpa": Attention, "hand": ByHand, "window": Windowed}


class Gpt(nn.Module):
    def __init__(self, vocabulary=32, width=16, heads=4, layers=2, longest=32, attention="sdpa"):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, ATTENTIONS[attention]) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, positions=None):
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """A residual MLP; `odd` has a learned gate of the features between the linears, and a shift of the stream."""

    def __init__(self, width, odd):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.randn(2 * width)) if odd else None
        self.shift = nn.Parameter(torch.randn(width)) if odd else None

    def forward(self, x):
        h = F.silu(self.up(self.norm(x)))
        if self.gate is not None:
            h, x = h * self.gate, x + self.shift
        return x + self.down(h)


class Ten(nn.Module):
    """Ten layers; the seventh is odd."""

    def __init__(self, vocabulary=32, width=16, layers=10, odd=6):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, number == odd) for number in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
