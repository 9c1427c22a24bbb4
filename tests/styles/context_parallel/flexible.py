"""A small model that attends by `flex_attention`: within documents, causally, in a window, with a learned bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.proof import subjects

TOKENS = 8
WINDOW = 5
PLAN = """version: 1
rules:
  attend: {style: context-parallel, method: METHOD}
  q: colwise
  kv: colwise
  o: rowwise
  "": fsdp
buffers: {batch: {input_ids: 1, labels: 1}}
"""


class Attend(nn.Module):
    """`length` is what the block mask is made for; None makes it for the rows that come, those of one rank."""

    def __init__(self, length: int | None = TOKENS, masked: bool = True) -> None:
        super().__init__()
        self.length, self.masked = length, masked

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {}
        if self.masked:
            length = self.length or q.size(2)
            options["block_mask"] = create_block_mask(seen, None, None, length, length, device=str(q.device))
        if bias is not None:
            options["score_mod"] = lambda score, b, h, i, j: score + bias[(i - j) % WINDOW]
        result: Tensor = flex_attention(q, k, v, enable_gqa=True, **options)
        return result


def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < WINDOW)


class Flexible(nn.Module):
    """Token ids [B, S] to logits; four query heads to two of keys."""

    def __init__(self, attend: Attend | None = None, biased: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(subjects.VOCAB, 16)
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(WINDOW)) if biased else None
        self.attend = attend or Attend()
        self.head = nn.Linear(16, subjects.VOCAB)

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.normal_(self.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(2, dim=-1)
        logits: Tensor = self.head(x + self.o(self.attend(q, k, v, self.bias).transpose(1, 2).flatten(2)))
        return logits
