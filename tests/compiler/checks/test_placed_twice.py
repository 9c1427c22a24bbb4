"""A parameter that two rules place."""

from __future__ import annotations

from tests.findings import finding, findings, marked, mesh_of
from tests.runtime.test_step import llama

TEXT = """
extends: llama
rules:
  layers.*.attention.w[qk].weight: {style: shard-params, params: shard(1)}
"""


def test_it_is_reported_once_for_each_pair_of_rules() -> None:
    found = finding(TEXT, llama(), mesh_of(tp=2))
    assert (found.code, found.message) == (
        "placed-twice", "shard-params and colwise both place layers.0.attention.wq.weight",
    )  # fmt: skip
    assert marked(TEXT, found) == "layers.*.attention.w[qk].weight"
    assert found.related[0].span.file.endswith("llama.yaml")


def test_other_parameters_of_the_same_module_may_be_named() -> None:
    text = "rules:\n  layers.0.attention.wq: {style: replicate}\n"
    text += "  layers.0.attention.wq.weight: {style: shard-params, params: shard(1)}"
    assert [d.code for d in findings(text, llama(), mesh_of(tp=2))] == ["placed-twice"]
    assert findings(text.replace("wq: ", "wk: "), llama(), mesh_of(tp=2)) == ()
