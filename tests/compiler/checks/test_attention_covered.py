"""Attention that is left out of context parallelism in some layers."""

from __future__ import annotations

import pytest

from tests.findings import findings, mesh_of
from tests.runtime.test_step import llama

REST = 'layers.*: fsdp, "": fsdp}\nbuffers: {batch: {input_ids: 1, labels: 1}, model: {"rope.*": 0}}'


@pytest.mark.parametrize(
    ("glob", "left_out"),
    [
        ("layers.1.attention.inner", "layers.{0,2,3}.attention.inner"),
        ("layers.{0..2}.attention.inner", "layers.3.attention.inner"),
        ("layers.[02].attention", "layers.{1,3}.attention"),
    ],
)
def test_a_layer_that_is_left_out_is_named(glob: str, left_out: str) -> None:
    text = f'rules: {{"{glob}": context-parallel, {REST}'
    [found] = findings(text, llama(n_layers=4), mesh_of(cp=2))
    assert found.code == "attention-left-out" and f"does not match {left_out}:" in found.message
    assert found.help and "layers.*.attention" in found.help
    assert findings(text, llama(n_layers=4), mesh_of(dp_shard=2)) == ()


@pytest.mark.parametrize("glob", ["layers.*.attention.inner", "layers.*.attention", "layers.?"])
def test_every_layer_s_attention_at_once(glob: str) -> None:
    assert findings(f'rules: {{"{glob}": context-parallel, {REST}', llama(n_layers=4), mesh_of(cp=2)) == ()


def test_layers_that_share_the_work_between_two_rules() -> None:
    text = (
        f"rules: {{layers.0.attention.inner: context-parallel, layers.1.attention: context-parallel, {REST}"
    )
    assert findings(text, llama(n_layers=2), mesh_of(cp=2)) == ()
