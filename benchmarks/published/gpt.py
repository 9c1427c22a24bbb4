"""A GPT-style decoder of the published runs: LayerNorm, a feed-forward network without gates, heads of one kind.

Positions are not embedded: ALiBi adds to the scores inside a fused kernel, and learned positions are one addition. Modules
have the names of `parallelizer.models.llama`, so that the plans are alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scores(nn.Module):
    """Attention over earlier positions, q, k and v [B, H, S, E]; `written_out`: as two products around a softmax, which stores
    the scores, as kernels did before 2022.
    """

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.written_out = written_out

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.written_out:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.matmul(q, k.transpose(-1, -2))
        return torch.matmul(F.softmax(scores, dim=-1), v)


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, written_out: bool) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.inner = Scores(written_out)

    def forward(self, x: Tensor) -> Tensor:
        B, S = x.shape[:2]
        q, k, v = (w(x).view(B, S, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.inner(q, k, v).transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden_dim, bias=False), nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, hidden_dim: int, written_out: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.LayerNorm(dim, bias=False) for _ in range(2))
        self.attention = Attention(dim, n_heads, written_out)
        self.feed_forward = FeedForward(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class GPT(nn.Module):
    """Token ids [B, S] to logits [B, S, vocab_size]."""

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        hidden_dim: int,
        tie_embeddings: bool = False,
        written_out: bool = False,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, hidden_dim, written_out) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))
