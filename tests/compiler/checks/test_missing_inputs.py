"""What forward cannot do without must be an entry of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from tests.parity import plan


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, tokens: Any, mask: Any = None, *more: Any, places: Any, **others: Any) -> Any:
        return self.embed(tokens)


def found(text: str, *entries: str) -> list[str]:
    workload = Workload({name: Entry(("batch", "sequence")) for name in entries}, 2, 8) if entries else None
    with torch.device("meta"):
        model = Takes()
    try:
        return [d.message for d in pz.compile(plan(text), model, Mesh({}), workload=workload).diagnostics]
    except pz.PlanError as error:
        return [d.message for d in error.diagnostics if d.code == "missing-input"]


def test_a_parameter_without_a_default_must_be_given_by_an_entry_or_the_plan() -> None:
    alone = "rules: {'': fsdp}"
    assert found(alone, "tokens", "places") == []
    assert found(alone, "tokens") == [
        "forward of Takes takes 'places', but the batch has no entry with this name"
    ]
    assert len(found(alone, "input_ids")) == 2
    made = "{rules: {'': fsdp}, buffers: {batch: {tokens: 1, places: positions}}}"
    assert found(made, "tokens") == []


def test_without_a_workload_nothing_is_known() -> None:
    assert found("rules: {'': fsdp}") == []
