"""A model that is cheap to trace, with as many lists of layers as asked for, called in several ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self, dim: int, hidden: int, index: int) -> None:
        super().__init__()
        self.up, self.down, self.index = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False), index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Token ids [B, S] to logits [B, S, vocabulary], through one list of layers for each of `depths`.

    The layer `odd` of each list is twice as wide. `way` says how layers are called: `each` in a loop over
    them; `count` by their number as it was at first; `shared` is one layer that stands in every place; `taps` adds what
    came in again behind every layer of odd index, and `skip` at index 4 alone.
    """

    def __init__(
        self, vocabulary: int, dim: int, depths: Sequence[int], odd: int | None = None, way: str = "each"
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.stacks = nn.ModuleList(
            nn.ModuleList(Layer(dim, dim * (4 if i == odd else 2), i) for i in range(depth))
            for depth in depths
        )
        if way == "shared":
            self.stacks = nn.ModuleList(nn.ModuleList([stack[0]] * len(stack)) for stack in self.stacks)
        self.output = nn.Linear(dim, vocabulary)
        self.counts, self.way = tuple(depths), way

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for stack, count in zip(self.stacks, self.counts, strict=True):
            came = x
            for i in range(count if self.way == "count" else len(stack)):
                x = stack[i](x)
                if (self.way == "taps" and i % 2) or (self.way == "skip" and i == 4):
                    x = x + came.sin()
        return self.output(x)
