"""The passes together: what order applications come in, and that a model is read and never changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.language.workload import Entry, Workload
from tests.findings import compiled, findings, mesh_of, on_meta
from tests.parity import plan
from tests.runtime.test_step import llama
from tests.snapshot import snapshot

ENTRIES = {
    "input_ids": Entry(("batch", "sequence"), range=(0, 32)),
    "labels": Entry(("batch", "sequence"), range=(0, 32)),
}
WORKLOAD = Workload(ENTRIES, 4, 16)
ALL = """
extends: llama
rules:
  layers.*: [checkpoint, fsdp]
  layers.*.attention: [{style: prepare-input, input: {x: stream -> replicate}}, fsdp]
"""


def test_applications_come_in_the_order_in_which_they_are_applied() -> None:
    program = compiled(ALL, llama(), mesh_of(dp_shard=2, cp=2, tp=2))
    slots = [a.slot for a in program]
    assert list(dict.fromkeys(slots)) == ["params", "io", "attention", "checkpoint", "fsdp"]
    order = {path: i for i, path in enumerate(dict(llama()().named_modules()))}
    for slot in ("params", "io", "attention", "checkpoint"):
        positions = [order[a.module] for a in program.of_slot(slot)]
        assert positions == sorted(positions)
    assert [a.module for a in program.of_slot("fsdp")] == [
        "layers.0.attention",
        "layers.1.attention",
        "layers.0",
        "layers.1",
        "tok_embeddings",
        "output",
        "",
    ]
    assert len(program) == len(list(program)) == len(slots)


def test_each_application_knows_its_rule() -> None:
    program = compiled(ALL, llama(), mesh_of(cp=2, tp=2))
    rules = {a.module: (a.rule.key, a.rule.span.line) for a in program.of_slot("io")}
    assert rules["layers.0.attention"] == ("layers.*.attention", 5)
    (inner,) = (a for a in program if a.module == "layers.0.attention.inner")
    assert (inner.rule.key, inner.style, inner.axes) == (
        "layers.*.attention.inner",
        "context-parallel",
        ("cp",),
    )


def test_on_one_rank_only_what_needs_no_axis_is_left() -> None:
    program = compiled(ALL, llama())
    assert {a.slot for a in program} == {"checkpoint"}


@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 2}, {"dp_shard": 2, "cp": 2, "tp": 4}, {"tp": 3}, {"tp_outer": 2}, {"cp": 3}]
)
def test_a_model_is_left_as_it_was(sizes: dict[str, int]) -> None:
    for model in (on_meta(llama()), llama()()):
        before = snapshot(model)
        try:
            pz.compile(plan(ALL), model, Mesh(sizes), workload=WORKLOAD)
        except pz.PlanError:
            assert sizes in ({"tp": 3}, {"tp_outer": 2}, {"cp": 3})
        assert snapshot(model) == before


def test_a_forward_that_leaves_things_behind_does_not_do_so_here() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
            self.cache: dict[str, Tensor] = {}

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.cache["ids"] = input_ids.float()[..., None].expand(-1, -1, 8)
            self.seen = True
            return torch.nn.functional.scaled_dot_product_attention(x, x, self.down(self.up(x)))

    model = on_meta(Caches)
    pz.compile(plan("rules: {up: colwise, down: rowwise}"), model, Mesh({"tp": 2}), workload=WORKLOAD)
    assert model.cache == {} and not hasattr(model, "seen")


def test_checks_wait_until_the_rules_are_right() -> None:
    spoilt = "extends: llama\nrules: {layer.*: fsdp}"
    assert [d.code for d in findings(spoilt, llama(), mesh_of(pp=2))] == ["unmatched-glob"]
    assert [d.code for d in findings("extends: llama", llama(), mesh_of(tp_outer=2))] == ["unused-axis"]


def test_warnings_are_handed_on_and_errors_raised() -> None:
    text = "rules: {output: colwise, out*: replicate}"
    program = compiled(text, llama(), mesh_of(tp=2))
    assert [(d.code, d.severity) for d in program.diagnostics] == [("shadowed-rule", "warning")]
    with pytest.raises(pz.PlanError) as caught:
        compiled(text, llama(), mesh_of(tp=2, pp=2))
    assert [d.code for d in caught.value.diagnostics] == ["shadowed-rule", "no-stages"]


def test_force_hands_the_findings_of_the_checks_on() -> None:
    program = compiled("extends: llama", llama(), mesh_of(tp=2, tp_outer=2), force=True)
    assert [d.code for d in program.diagnostics] == ["unused-axis"]
    assert len(program) == len(compiled("extends: llama", llama(), mesh_of(tp=2)))
    with pytest.raises(pz.PlanError, match="unmatched-glob"):
        compiled("extends: llama\nrules: {layer.*: fsdp}", llama(), mesh_of(tp=2), force=True)


def test_compiling_is_fast_enough_for_a_deep_model() -> None:
    import time

    started = time.monotonic()
    program = compiled(
        "extends: llama", llama(n_layers=126), mesh_of(dp_shard=4, cp=2, tp=4), workload=WORKLOAD
    )
    assert len(program) > 126 * 12
    assert time.monotonic() - started < 20
