"""Attention that reads sizes of the whole model from attributes, in the ways that people write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from tests.styles.models import Conv1D


@dataclass
class Config:
    heads: int = 4
    kv_heads: int = 2


class Attention(nn.Module):
    """`q|k|v` in one linear, taken apart as `kind` says."""

    def __init__(self, dim: int, kind: str, config: Config, index: int) -> None:
        super().__init__()
        self.config, self.kind, self.index = config, kind, index
        self.heads, self.kv_heads, self.size = config.heads, config.kv_heads, 8
        self.block_size = self.window = 16
        self.q_size, self.kv_size = self.heads * self.size, self.kv_heads * self.size
        made = self.q_size + 2 * self.kv_size
        self.qkv = Conv1D(made, dim) if kind == "transposed" else nn.Linear(dim, made)
        self.out = nn.Linear(self.q_size, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = getattr(self, self.kind)(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def view(self, qkv: Tensor) -> tuple[Tensor, ...]:
        rows = qkv.shape[:2]
        half = qkv.shape[-1] // 2
        q = qkv[..., :half].view(*rows, self.heads, self.size)
        k, v = qkv[..., half:].view(*rows, 2, self.kv_heads, self.size).unbind(2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def sizes(self, qkv: Tensor) -> tuple[Tensor, ...]:
        parts = qkv.split([self.q_size, self.kv_size, self.kv_size], -1)
        return tuple(t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in parts)

    def transposed(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return self.sizes(qkv)

    def halves(self, qkv: Tensor) -> tuple[Tensor, ...]:
        q, kv = qkv.split(self.q_size, -1)
        k, v = kv.chunk(2, -1)
        return tuple(t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))

    def rest(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return (qkv[..., : self.q_size].view(*qkv.shape[:2], -1, self.size, 7),)

    def accident(self, qkv: Tensor) -> tuple[Tensor, ...]:
        rows, length = qkv.shape[:2]
        assert rows <= self.block_size
        return (qkv[..., :16].view(rows, length, self.heads, self.size),)

    def asserted(self, qkv: Tensor) -> tuple[Tensor, ...]:
        rows, length = qkv.shape[:2]
        assert length <= self.window
        return self.sizes(qkv.view(rows, length, 64))

    def other(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return (qkv.view(3, 5, 7),)


class Configured(Attention):
    """As `Attention`, with the numbers of the shared configuration."""

    def forward(self, x: Tensor) -> Tensor:
        qkv, rows, config = self.qkv(x), x.shape[:2], self.config
        queries, keys = config.heads * self.size, config.kv_heads * self.size
        q, k, v = qkv[..., :queries], qkv[..., queries : queries + keys], qkv[..., queries + keys :]
        q, k, v = (t.view(*rows, -1, self.size).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Reading(nn.Module):
    """Token ids [B, S] to logits [B, S, vocabulary]."""

    def __init__(self, vocabulary: int, dim: int, depth: int, kind: str) -> None:
        super().__init__()
        config = Config()
        self.tokens = nn.Embedding(vocabulary, dim)
        attention = Configured if kind == "configured" else Attention
        self.layers = nn.ModuleList(attention(dim, kind, config, index) for index in range(depth))
        self.output = nn.Linear(dim, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x)
