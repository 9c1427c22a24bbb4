"""Packed documents under context parallelism: a model that is given a mask and positions, dealt out in every order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.proof.prove import prove
from parallelizer.styles.context_parallel import document_mask
from tests.chosen import marks_at
from tests.proof import subjects
from tests.proof.faults import on_ranks

PLAN = """
version: 1
rules:
  attend: {{style: context-parallel, method: {method}, balance: {balance}}}
  "[qkv]": colwise
  o: rowwise
  "": fsdp
buffers:
  batch:
    input_ids: 1
    labels: {{dim: 1, pad: -100}}
    document_ids: {{dim: 1, documents: true}}
    positions: positions
    mask: document-mask
"""


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Packed(nn.Module):
    """One layer that sees its own document only."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.embed, self.at = nn.Embedding(256, 16), nn.Embedding(512, 16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.attend, self.head = Attend(), nn.Linear(16, 256)

    def forward(self, input_ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.at(positions)
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.head(x + self.o(self.attend(q, k, v, mask).transpose(1, 2).flatten(2)))


def overrides(
    folder: Path, preset: str, method: str, balance: str, length: int, ascending: bool = True
) -> list[str]:
    plan = folder / "plan.yaml"
    plan.write_text(PLAN.format(method=method, balance=balance))
    return [
        f"parallel={preset}",
        f"model._target_={__name__}.Packed",
        f"plan={plan}",
        f"train.seq_len={length}",
        "++model.batch.document_ids={shape: [batch, sequence], dtype: int64, range: [0, 3], "
        f"ascending: {str(ascending).lower()}}}",
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("preset", "method", "balance", "length", "ascending"),
    [
        pytest.param("cp2", "all-gather", "per-document", 12, True, marks=marks_at(0)),
        pytest.param("cp2", "ring", "by-cost", 11, True, marks=marks_at(1)),
        pytest.param("cp2_tp2", "ulysses", "auto", 10, True, marks=marks_at(2)),
        pytest.param("cp2_tp2", "all-gather", "none", 13, True, marks=marks_at(2)),
        pytest.param("cp2_tp2", "ulysses", "auto", 10, False, marks=marks_at(2)),
    ],
)
def test_packed_documents_are_proven_in_every_order(
    tmp_path: Path, preset: str, method: str, balance: str, length: int, ascending: bool
) -> None:
    proof = prove(subjects.setup(*overrides(tmp_path, preset, method, balance, length, ascending)))
    assert proof.passed, proof.divergence


def _wrong_columns(right: Any, ids: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    columns: Tensor = right(ids, rows, device).roll(1, -1)
    return columns


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("balance", "said"),
    [("none", "the output of attend differs"), ("per-document", "modules' outputs cannot be compared")],
)
def test_a_wrong_mask_is_found_and_the_order_is_known_where_it_can_be(
    tmp_path: Path, balance: str, said: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        on_ranks(patch, document_mask, "made", _wrong_columns)
        proof = prove(subjects.setup(*overrides(tmp_path, "cp2", "all-gather", balance, 12)))
    assert not proof.passed and proof.divergence is not None
    assert said in proof.divergence.description
