"""Weights that were computed from parameters and kept."""

from __future__ import annotations

import torch
from torch import nn

from tests.findings import findings, mesh_of
from tests.styles.models import around

MESH = mesh_of(dp_shard=2)


def test_the_old_weight_norm_is_named_and_nothing_else_is_asked() -> None:
    model = around(lambda: nn.utils.weight_norm(nn.Linear(8, 8)))
    [found] = findings('rules: {inner: colwise, "": fsdp}', model, mesh_of(tp=2, dp_shard=2))
    assert found.code == "computed-tensor" and " keeps inner.weight as a tensor" in found.message
    assert found.help is not None and "parametrizations.weight_norm" in found.help


def test_the_parametrization_is_fine() -> None:
    model = around(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    assert "computed-tensor" not in {one.code for one in findings('rules: {"": fsdp}', model, MESH)}


def test_what_a_forward_has_left_behind_is_fine() -> None:
    model = nn.Linear(8, 8)
    model.seen = model(torch.ones(1, 8))
    assert findings('rules: {"": fsdp}', lambda: model, MESH) == ()
