"""An axis on which nothing stands."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import Span
from tests.findings import finding, findings, mesh_of
from tests.runtime.test_step import llama
from tests.styles.models import Mlp, around


@pytest.mark.parametrize(
    ("sizes", "axis", "help_text"),
    [
        ({"tp_outer": 2}, "tp_outer", "add rules with styles that use tp_outer, or set it to 1"),
        ({"cp": 2}, "cp", "add `context-parallel` to the modules that call attention"),
        ({"tp": 2}, "tp", "add rules with styles that use tp, or set it to 1"),
    ],
)
def test_its_ranks_would_all_compute_the_same(sizes: dict[str, int], axis: str, help_text: str) -> None:
    found = finding('rules: {"": fsdp}', llama(), mesh_of(**sizes))
    assert (found.code, found.help, found.span) == ("unused-axis", help_text, Span("mesh", 1, 2, 3))
    assert found.message == f"no rule uses {axis}=2: all its ranks would compute the same"


def test_data_axes_are_used_by_the_batch() -> None:
    assert findings('rules: {"": fsdp}', llama(), mesh_of(dp_shard=2, dp_replicate=2)) == ()


def test_any_style_on_an_axis_uses_it() -> None:
    text = 'rules: {inner: {style: prepare-io, axis: cp, input: replicate -> shard(1), output: shard(1) -> replicate}, "": fsdp}'
    assert findings(text, around(Mlp), mesh_of(cp=2)) == ()
    assert (
        findings("rules: {inner.up: {style: replicate, axis: tp_outer}}", around(Mlp), mesh_of(tp_outer=2))
        == ()
    )
