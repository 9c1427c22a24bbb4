"""Masks of a model's own, from the batch to the gradients, on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.testing import assert_equivalent
from tests.proof import subjects

ROWS, TOKENS, HEADS = 4, 8, 4
PLAN = """rules:
  attend: {style: context-parallel, method: METHOD}
  "": fsdp
buffers: {batch: {input_ids: 1, mask: 2, labels: 1}}
"""


class Attend(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)


class Documents(nn.Module):
    """Attention under a mask that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(subjects.VOCAB, 16), nn.Linear(16, subjects.VOCAB)
        self.attend = Attend()

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        logits: Tensor = self.head(x + self.attend(x, mask))
        return logits


def packed(seed: int) -> dict[str, Tensor]:
    """Causal within documents, whose lengths differ from row to row."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, subjects.VOCAB, (2, ROWS, TOKENS), generator=generator)
    document = (torch.rand(ROWS, TOKENS, generator=generator) < 0.3).cumsum(1)
    mask = (document.unsqueeze(2) == document.unsqueeze(1)) & torch.ones(TOKENS, TOKENS).tril().bool()
    return {"input_ids": ids, "mask": mask.unsqueeze(1), "labels": labels}


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["all-gather", "ulysses", "auto"])
def test_packed_documents_are_proven(method: str) -> None:
    assert_equivalent(
        Documents,
        subjects.plan(PLAN.replace("METHOD", method)),
        {"cp": 2},
        loss=subjects.token_loss,
        batch=packed,
    )
