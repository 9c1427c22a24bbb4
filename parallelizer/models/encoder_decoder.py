"""An encoder and a decoder in the manner of T5, with no parallelism in them: learned biases of relative positions, attention
across, gated GELU, RMSNorm before each part, one embedding for what is read, what is written, and the logits.

After Raffel et al., 2020 (arXiv:1910.10683), with the gated MLP of its version 1.1 (Shazeer, 2020, arXiv:2002.05202).

Letters in shapes: B batch, S sequence, Q queries and K keys of an attention, H heads, E `head_dim`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` without bias, whose weights have the standard deviation `std`."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension, in float32, and scales by `weight`."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RelativeBias(nn.Module):
    """What attention adds to its scores for the distance of a key from a query, learned for each head and each bucket of
    distances: near ones have a bucket each, farther ones share them on a logarithmic scale up to `max_distance`.
    """

    def __init__(self, buckets: int, max_distance: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.values = nn.Embedding(buckets, heads)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, key minus query, int64 of the same shape."""
        count, first = self.buckets, torch.zeros_like(distance)
        if self.causal:
            distance = (-distance).clamp(min=0)
        else:
            count //= 2
            first = (distance > 0) * count
            distance = distance.abs()
        near = count // 2
        far = torch.log(distance.clamp(min=1).float() / near) / math.log(self.max_distance / near)
        spread = (near + (far * (count - near)).long()).clamp(max=count - 1)
        return first + torch.where(distance < near, distance, spread)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The biases [1, H, Q, K] at positions `queries` [1, Q] and `keys` [1, K]; causal ones are -inf for later keys."""
        distance = keys[:, None, :] - queries[:, :, None]
        bias = self.values(self.bucket(distance)).permute(0, 3, 1, 2)
        return bias.masked_fill((distance > 0)[:, None], float("-inf")) if self.causal else bias


class Attention(nn.Module):
    """Attention among the rows of `x`, or from them to those of `memory`; scores are not scaled, as in T5."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = Linear(dim, heads * head_dim, std=(dim * head_dim) ** -0.5)
        self.k = Linear(dim, heads * head_dim, std=dim**-0.5)
        self.v = Linear(dim, heads * head_dim, std=dim**-0.5)
        self.o = Linear(heads * head_dim, dim, std=(heads * head_dim) ** -0.5)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in (self.q(x), self.k(memory), self.v(memory))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(out.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """wo(gelu(wi_0(x)) * wi_1(x))."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.wi_0 = Linear(dim, hidden_dim, std=dim**-0.5)
        self.wi_1 = Linear(dim, hidden_dim, std=dim**-0.5)
        self.wo = Linear(hidden_dim, dim, std=hidden_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class EncoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), Attention(dim, heads, head_dim)
        self.mlp_norm, self.mlp = RMSNorm(dim), GatedMlp(dim, hidden_dim)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), bias=bias)
        return x + self.mlp(self.mlp_norm(x))


class DecoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(dim), Attention(dim, heads, head_dim)
        self.cross_norm, self.cross = RMSNorm(dim), Attention(dim, heads, head_dim)
        self.mlp_norm, self.mlp = RMSNorm(dim), GatedMlp(dim, hidden_dim)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), bias=bias)
        x = x + self.cross(self.cross_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Blocks, the bias that all of them share, and the last norm. With `memory` it is a decoder."""

    def __init__(self, blocks: list[EncoderBlock] | list[DecoderBlock], bias: RelativeBias, dim: int) -> None:
        super().__init__()
        self.bias = bias
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(dim)

    def forward(self, x: Tensor, positions: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = self.bias(positions[:1], positions[:1])
        for block in self.blocks:
            x = block(x, bias) if memory is None else block(x, bias, memory)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    """Token ids that are read [B, S] and written [B, T] to logits [B, T, vocab_size].

    `positions` [B or 1, S] and `decoder_positions` [B or 1, T], the same in all rows, are 0, 1, 2, ... unless given.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        n_layers: int,
        heads: int,
        head_dim: int,
        hidden_dim: int,
        buckets: int = 32,
        max_distance: int = 128,
    ) -> None:
        super().__init__()
        sizes = (dim, heads, head_dim, hidden_dim)
        self.dim = dim
        self.shared = nn.Embedding(vocab_size, dim)
        self.encoder = Stack(
            [EncoderBlock(*sizes) for _ in range(n_layers)],
            RelativeBias(buckets, max_distance, heads, causal=False),
            dim,
        )
        self.decoder = Stack(
            [DecoderBlock(*sizes) for _ in range(n_layers)],
            RelativeBias(buckets, max_distance, heads, causal=True),
            dim,
        )
        self.head = Linear(dim, vocab_size, std=1.0)
        self.head.weight = self.shared.weight

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        positions: Tensor | None = None,
        decoder_positions: Tensor | None = None,
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        if decoder_positions is None:
            length = decoder_input_ids.shape[1]
            decoder_positions = torch.arange(length, device=decoder_input_ids.device).unsqueeze(0)
        memory = self.encoder(self.shared(input_ids), positions)
        x = self.decoder(self.shared(decoder_input_ids), decoder_positions, memory)
        return self.head(x * self.dim**-0.5)  # as the embedding, which is scaled for the input of a stack
