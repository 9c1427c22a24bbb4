"""A Vision Transformer with no parallelism in it, as one would write it for a single GPU.

Images are cut into patches, which one convolution projects; blocks are pre-norm, with one fused projection to queries,
keys and values; the mean over the patches, or a class token, is classified (Dosovitskiy et al., 2021, arXiv:2010.11929).

Letters in shapes: B images, N patches (and the class token), D `dim`, H heads, E `head_dim`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


class PatchEmbedding(nn.Module):
    """Images [B, C, height, width] to patches [B, N, D], with learned positions; a class token before them if wanted."""

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int, class_token: bool) -> None:
        super().__init__()
        patches = (image_size // patch_size) ** 2
        self.project = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, dim)) if class_token else None
        self.positions = nn.Parameter(torch.empty(1, patches + class_token, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, images: Tensor) -> Tensor:
        x = self.project(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.positions


class Attention(nn.Module):
    """Every patch attends to every other. `qkv` is one projection: all queries, then all keys, then all values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention, then the MLP, each on the normed stream and added to it."""

    def __init__(self, dim: int, num_heads: int, hidden_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images [B, C, image_size, image_size] to logits [B, num_classes].

    ValueError where sizes do not divide: `image_size` by `patch_size`, `dim` by `num_heads`.
    """

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        num_classes: int,
        dim: int,
        depth: int,
        num_heads: int,
        hidden_dim: int,
        channels: int = 3,
        class_token: bool = False,
    ) -> None:
        super().__init__()
        for name, size, part, divisor in (
            ("image_size", image_size, "patch_size", patch_size),
            ("dim", dim, "num_heads", num_heads),
        ):
            if size % divisor:
                raise ValueError(f"{name} {size} is not a multiple of {part} {divisor}")
        self.class_token = class_token
        self.embed = PatchEmbedding(image_size, patch_size, channels, dim, class_token)
        self.blocks = nn.ModuleList(Block(dim, num_heads, hidden_dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.class_token else x.mean(dim=1))
