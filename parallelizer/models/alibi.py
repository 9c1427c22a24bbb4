"""A decoder in the manner of BLOOM, with no parallelism in it: no positions but what ALiBi takes off the score of a key for its
distance, a fused projection interleaved head by head, norms with biases, and the embedding as the head.

After Press et al., 2022 (arXiv:2108.12409) and Le Scao et al., 2022 (arXiv:2211.05100).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def slopes(heads: int) -> Tensor:
    """Of each head how much a key loses for each token of distance: 2^(-8/n), 2^(-16/n), ..., float32 [heads].

    Of a number that is no power of two, the first are those of the power below, the others every second one of the power
    above.
    """
    below = 2 ** (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    others = [2.0 ** (-8 * (i + 1) / (2 * below)) for i in range(0, 2 * (heads - below), 2)]
    return torch.tensor(first + others)


class Embedding(nn.Embedding):
    """`nn.Embedding` with the small values that a head wants."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Causal attention; `query_key_value` has the query, the key and the value of the first head, then of the second, ..."""

    slopes: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.dense = nn.Linear(dim, dim)
        self.register_buffer("slopes", torch.empty(heads), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.slopes.copy_(slopes(len(self.slopes)))

    def forward(self, x: Tensor, distance: Tensor) -> Tensor:
        """`distance` [1, 1, Q, K] of keys from queries, negative, and -inf for later keys."""
        heads = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim))
        q, k, v = heads.permute(3, 0, 2, 1, 4).unbind(0)
        bias = (self.slopes[:, None, None] * distance).to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.dense(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, distance: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), distance)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Distance(nn.Module):
    """Of each key from each query, [1, 1, Q, K] float32; -inf where the key is later."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (keys[:, None, None, :] - queries[:, None, :, None]).float()
        return distance.masked_fill(distance > 0, float("-inf"))


class Alibi(nn.Module):
    """Token ids [B, S] to logits [B, S, vocab_size]; `positions` [B or 1, S], the same in all rows, unless 0, 1, 2, ..."""

    def __init__(self, *, vocab_size: int, dim: int, n_layers: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        self.embed, self.embed_norm = Embedding(vocab_size, dim), nn.LayerNorm(dim)
        self.distance = Distance()
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        distance = self.distance(positions[:1], positions[:1])
        x = self.embed_norm(self.embed(input_ids))
        for block in self.blocks:
            x = block(x, distance)
        return self.head(self.norm(x))
