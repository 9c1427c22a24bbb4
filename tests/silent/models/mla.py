"""Latent attention: queries and keys of a small latent, normalised, and a rotary key that all heads share."""

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def rotate(x, positions):
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = (positions.to(x.dtype).unsqueeze(-1) * rates).unsqueeze(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self, width, heads, latent=8, nope=4, rope=4):
        super().__init__()
        self.nope, self.rope, self.latent = nope, rope, latent
        self.q_down, self.q_norm = nn.Linear(width, latent, bias=False), RmsNorm(latent)
        self.q_up = nn.Linear(latent, heads * (nope + rope), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(width, latent + rope, bias=False), RmsNorm(latent)
        self.kv_up = nn.Linear(latent, heads * 2 * nope, bias=False)
        self.out = nn.Linear(heads * nope, width, bias=False)

    def forward(self, x, positions):
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (-1, self.nope + self.rope))
        latent, shared = self.kv_down(x).split([self.latent, self.rope], -1)
        k, v = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, 2 * self.nope)).chunk(2, -1)
        shared = rotate(shared.unsqueeze(2), positions).expand(-1, -1, k.shape[2], -1)
        q = torch.cat([q[..., : self.nope], rotate(q[..., self.nope :], positions)], -1).transpose(1, 2)
        k = torch.cat([k, shared], -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, self.rope)).transpose(1, 2), is_causal=True)
        return self.out(y.transpose(1, 2)[..., : self.nope].flatten(2))


class Mla(nn.Module):
    def __init__(self, vocabulary=32, width=16, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(RmsNorm(width) for _ in range(layers))
        self.attns = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, positions=None):
        if positions is None:
            positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        x = self.embed(input_ids)
        for norm, attn in zip(self.norms, self.attns, strict=True):
            x = x + attn(norm(x), positions)
        return self.head(x)
