"""A decoder unlike the recipe's: LayerNorm and biases, a fused q, k and v, GELU, learned positions, the
output tied to the embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention from one fused projection; `heads` may be a slice of them."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.size)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linears with GELU between."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention, then the MLP, each on the normed stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Token ids [B, S] to logits [B, S, vocabulary]."""

    def __init__(self, vocabulary: int, dim: int, heads: int, depth: int, positions: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(positions, dim)
        self.blocks = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        where = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(where)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))
