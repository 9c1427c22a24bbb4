"""Modules whose parameters have no shape yet."""

from __future__ import annotations

from torch import nn

from tests.findings import findings, mesh_of
from tests.styles.models import around


def test_a_lazy_linear_is_named_and_nothing_else_is_asked() -> None:
    found = findings('rules: {inner: colwise, "": fsdp}', around(nn.LazyLinear, 8), mesh_of(tp=2, dp_shard=2))
    assert [(d.code, d.message) for d in found] == [
        ("lazy-module", "inner (LazyLinear) has parameters without a shape")
    ]
    assert found[0].help


def test_a_linear_is_fine() -> None:
    assert findings('rules: {inner: colwise, "": fsdp}', around(nn.Linear, 8, 8)) == ()
