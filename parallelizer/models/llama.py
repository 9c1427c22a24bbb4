"""A Llama-style decoder with no parallelism in it: grouped-query attention, RoPE, RMSNorm, SwiGLU.

Letters in shapes: B batch, S sequence, H query heads, K key-value heads, E `head_dim`.

A module that owns parameters or buffers has `reset_parameters()`, which initialises those and no others,
in place. So the model can be built on the meta device and initialised one module at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


class Linear(nn.Linear):
    """`nn.Linear` without bias, initialised from a normal distribution."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Embedding(nn.Embedding):
    """`nn.Embedding`, initialised from a normal distribution."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension, in float32, and scales by `weight`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """The cosines and sines that rotate queries and keys; buffers `cos` and `sin` are [max_seq_len, E/2]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.register_buffer("cos", torch.empty(max_seq_len, head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(max_seq_len, head_dim // 2), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        device = self.cos.device
        even = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        position = torch.arange(self.max_seq_len, dtype=torch.float32, device=device)
        angle = torch.outer(position, self.theta ** (-even / self.head_dim))
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, seq_len: int, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rows of the first `seq_len` positions, [S, E/2], or of `position_ids` [B, S], [B, S, E/2]. ValueError if there
        are fewer positions than tokens.
        """
        if position_ids is not None:
            return self.cos[position_ids], self.sin[position_ids]
        if seq_len > self.cos.shape[0]:
            raise ValueError(f"a sequence of {seq_len} tokens; max_seq_len is {self.cos.shape[0]}")
        return self.cos[:seq_len], self.sin[:seq_len]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring pairs of the last dimension of `x` [B, S, heads, E] by `cos`, `sin`, [S, E/2] or [B, S, E/2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    even, odd = x[..., 0::2], x[..., 1::2]
    # float32 cosines promote the product, so that a bfloat16 x is rotated in float32.
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)


class CausalAttention(nn.Module):
    """softmax(q kᵀ / sqrt(E)) v over earlier positions: q [B, H, S, E], k and v [B, K, S, E]; or over those that a mask,
    bool [B, 1, S, S], shows.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )


class Attention(nn.Module):
    """Grouped-query self-attention: each key-value head serves H / K query heads."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = Linear(dim, n_heads * self.head_dim)
        self.wk = Linear(dim, n_kv_heads * self.head_dim)
        self.wv = Linear(dim, n_kv_heads * self.head_dim)
        self.wo = Linear(n_heads * self.head_dim, dim)
        self.inner = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        B, S = x.shape[:2]
        # -1 counts the heads that are here: all of them, or one rank's slice.
        q = self.wq(x).view(B, S, -1, self.head_dim)
        k = self.wk(x).view(B, S, -1, self.head_dim)
        v = self.wv(x).view(B, S, -1, self.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.inner(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim)
        self.w2 = Linear(hidden_dim, dim)
        self.w3 = Linear(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention, then the feed-forward network, each on the normed stream and added to it."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.feed_forward = FeedForward(dim, hidden_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids [B, S] to logits [B, S, vocab_size].

    Packed documents come with `position_ids` [B, S], which begin again with each, and `attention_mask` bool [B, 1, S, S]: which
    tokens see which; without a mask each sees those before it.
    `tie_embeddings` makes `output.weight` the same parameter as `tok_embeddings.weight`.
    ValueError where heads do not divide: `dim` by `n_heads` to an even number, `n_heads` by `n_kv_heads`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        hidden_dim: int,
        max_seq_len: int,
        rope_theta: float = 500000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if dim % (2 * n_heads):
            raise ValueError(f"dim {dim} is not n_heads {n_heads} times an even head size")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads {n_heads} is not a multiple of n_kv_heads {n_kv_heads}")
        self.tok_embeddings = Embedding(vocab_size, dim)
        self.rope = RotaryEmbedding(dim // n_heads, max_seq_len, rope_theta)
        self.layers = nn.ModuleList(
            Block(dim, n_heads, n_kv_heads, hidden_dim, norm_eps) for _ in range(n_layers)
        )
        self.norm = RMSNorm(dim, norm_eps)
        self.output = Linear(dim, vocab_size)
        if tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        cos, sin = self.rope(input_ids.shape[1], position_ids)
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attention_mask)
        return self.output(self.norm(x))
