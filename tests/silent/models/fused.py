"""Parallel blocks: rotary ones like GPT-J's, and one projection for queries, keys, values, gate and up."""

import torch
import torch.nn.functional as F
from torch import nn


def rotary(x, table):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = table
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class JBlock(nn.Module):
    """Attention and MLP read one norm, and both are added; the biases of out and fc_out add up."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.ln = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.fc_in, self.fc_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, h, table):
        q, k, v = (f(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotary(q, table), rotary(k, table), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, table):
        h = self.ln(x)
        return x + self.attend(h, table) + self.fc_out(F.gelu(self.fc_in(h)))


class GptJ(nn.Module):
    def __init__(self, vocabulary=32, width=16, heads=4, layers=2, longest=16):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(JBlock(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        half = width // heads // 2
        angles = torch.arange(longest).unsqueeze(-1) * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, input_ids):
        length = input_ids.shape[1]
        x, table = self.wte(input_ids), (self.cos[:length], self.sin[:length])
        for block in self.h:
            x = block(x, table)
        return self.lm_head(self.ln_f(x))


class PalmBlock(nn.Module):
    """All of q, k, v, gate and up in one projection, attention's and the MLP's outputs in another."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.width, self.heads, self.hidden = width, heads, hidden
        self.norm = nn.LayerNorm(width)
        self.wi = nn.Linear(width, 3 * width + 2 * hidden, bias=False)
        self.wo = nn.Linear(width + hidden, width, bias=False)

    def forward(self, x):
        q, k, v, gate, up = self.wi(self.norm(x)).split([self.width] * 3 + [self.hidden] * 2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.wo(torch.cat([y, F.silu(gate) * up], -1))


class Palm(nn.Module):
    def __init__(self, vocabulary=32, width=16, heads=4, hidden=24, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(PalmBlock(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class Swiglu(nn.Module):
    """Gate and up in one linear, halves side by side."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.gate_up = nn.LayerNorm(width), nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Interleaved(Swiglu):
    """Gate and up of each feature side by side."""

    def forward(self, x):
        both = self.gate_up(self.norm(x)).unflatten(-1, (-1, 2))
        return x + self.down(F.silu(both[..., 0]) * both[..., 1])


GATED = {"halves": Swiglu, "interleaved": Interleaved}


class Gated(nn.Module):
    def __init__(self, vocabulary=32, width=16, layers=2, kind="halves"):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GATED[kind](width, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
