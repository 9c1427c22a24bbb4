"""The models of `along` and `moe` with an attention before their blocks, which context parallelism needs."""

import torch.nn.functional as F
from torch import nn

from tests.silent.models.along import Along
from tests.silent.models.moe import Balanced, BalancedByRow, Moe


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.head_dim = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class _First(nn.Sequential):
    """Words, then attention over them."""

    def __init__(self, words):
        super().__init__()
        self.words, self.attention = words, Attention(words.embedding_dim)


class AttendedAlong(Along):
    def __init__(self, kind, **sizes):
        super().__init__(kind, **sizes)
        self.words = _First(self.words)


class AttendedMoe(Moe):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.embed = _First(self.embed)


class AttendedBalanced(Balanced):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.embed = _First(self.embed)


class AttendedByRow(BalancedByRow):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.embed = _First(self.embed)
