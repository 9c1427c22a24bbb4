"""An encoder like T5's: RMS norms, no scaling, and a bias of relative positions that all layers share."""

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.1 + 1)

    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


class Bias(nn.Module):
    def __init__(self, heads, distance=8):
        super().__init__()
        self.distance = distance
        self.table = nn.Embedding(2 * distance + 1, heads)

    def forward(self, queries, keys):
        relative = (keys[None] - queries[:, None]).clamp(-self.distance, self.distance) + self.distance
        return self.table(relative).permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.kv = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, bias):
        q, k, v = (f(x).unflatten(-1, (-1, self.kv)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.attention = Attention(width, heads)
        self.wi, self.wo = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x, bias):
        x = x + self.attention(self.norm1(x), bias)
        return x + self.wo(F.relu(self.wi(self.norm2(x))))


class T5(nn.Module):
    """`everywhere` are the positions of the keys; a caller with a part of the sequence gives its own positions."""

    def __init__(self, vocabulary=32, width=16, heads=4, layers=2):
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.bias = Bias(heads)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = RmsNorm(width)

    def forward(self, input_ids, positions=None):
        places = torch.arange(input_ids.shape[1]) if positions is None else positions[0]
        x, bias = self.shared(input_ids), self.bias(places, places)
        for layer in self.layers:
            x = layer(x, bias)
        return F.linear(self.norm(x) * 16**-0.5, self.shared.weight)
