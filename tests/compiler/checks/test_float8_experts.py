"""Stacked experts whose sizes kernels do not take, or whose forward sees DTensors, are errors at the rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallelizer.styles.float8.recipes import rows_matter
from tests.findings import compiled, finding, findings, marked, mesh_of
from tests.styles.models import around

pytest.importorskip("torchao", reason="float8 needs torchao")


class Experts(nn.Module):
    def __init__(self, hidden: int = 32, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("it is only compiled")


FLOAT8 = "{style: float8, recipe: rowwise}"
SPLIT = "{style: shard-params, params: {up: shard(1), down: shard(2)}}"


def test_an_expert_s_part_has_multiples_of_16() -> None:
    text = f"rules: {{inner: [{SPLIT}, {FLOAT8}]}}"
    assert findings(text, around(Experts, 32), mesh_of(tp=2)) == ()
    found = finding(text, around(Experts, 48), mesh_of(tp=2))
    assert (found.code, marked(text, found)) == ("precision-size", "inner")
    assert found.message == (
        "an expert of inner.up is 24x32 on a rank: float8 kernels need multiples of 16 (1 more like it)"
    )
    emulated = text.replace("rowwise}", "rowwise, emulate: true}")
    assert findings(emulated, around(Experts, 48), mesh_of(tp=2)) == ()


def test_experts_that_are_shared_out_are_whole() -> None:
    text = f'rules: {{inner: [experts, {FLOAT8}], "": fsdp}}'
    assert findings(text, around(Experts, 48), mesh_of(dp_shard=2, ep=2)) == ()
    program = compiled(text, around(Experts, 48), mesh_of(dp_shard=2, ep=2))
    assert [a.style for a in program if a.module == "inner"] == ["float8", "experts"]
    assert not any(map(rows_matter, program.of_slot("precision")))


def test_products_of_dtensors_are_not_replaced() -> None:
    layouts = "input: {hidden_states: replicate}, output: partial -> replicate, local: false"
    text = f"rules: {{inner: [{SPLIT[:-1]}, {layouts}}}, {FLOAT8}]}}"
    found = finding(text, around(Experts), mesh_of(tp=2))
    assert (found.code, marked(text, found)) == ("precision-experts", "inner")
    assert found.message.startswith("the forward of inner runs on DTensors")
