"""Options and layouts filled in, styles asked, FSDP's units drawn."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import REPLICATE, Flow, Mesh, StyleDefaults, shard
from tests.findings import compiled, finding, findings, marked, mesh_of, on_meta
from tests.parity import plan
from tests.runtime.test_step import llama
from tests.styles.models import Mlp, around

MLP = around(Mlp)
TP = mesh_of(tp=2)


class Shared(nn.Module):
    """Two layers with one parameter, and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6, False), nn.Linear(6, 6, False), nn.Linear(6, 10, False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(self.b(self.a(x)))
        return y


def rules(*lines: str) -> str:
    return "rules:\n" + "".join(f"  {line}\n" for line in lines)


# Options


def test_a_rules_own_option_wins_over_the_presets() -> None:
    text = rules(
        "inner.up: {style: colwise, local: false}", "inner.down: rowwise", "inner: {style: checkpoint}"
    )
    program = compiled(text, MLP, TP, options={"colwise": {"local": True}, "rowwise": {"local": True}})
    options = {a.module: dict(a.options) for a in program}
    assert options == {"inner.up": {"local": False}, "inner.down": {"local": True}, "inner": {}}
    spans = {a.module: {k: s.file for k, s in a.spans.items()} for a in program}
    assert spans["inner.down"] == {"local": "<preset>"} and spans["inner.up"]["local"].endswith("plan.yaml")


def test_a_mistake_in_a_presets_option_is_shown_in_the_preset() -> None:
    found = finding(rules("inner.up: colwise"), MLP, TP, options={"colwise": {"packed": (1, 4)}})
    assert (found.code, found.span) == ("not-divisible", Span("<preset>"))


def test_sizes_of_an_axis_that_are_proposed_divide_all_that_it_divides() -> None:
    model = llama()()
    hidden, vocabulary = model.layers[0].feed_forward.w1.weight.shape[0], model.output.weight.shape[0]
    found = findings(rules("layers.*.feed_forward.w[13]: colwise", "output: colwise"), llama(), mesh_of(tp=7))
    assert [d.code for d in found] == ["not-divisible", "not-divisible"]
    first, second = ({int(n) for n in re.findall(r"\d+", (d.help or "").partition("(")[0])} for d in found)
    assert hidden != vocabulary
    assert first == second == {n for n in range(1, hidden + 1) if not hidden % n and not vocabulary % n}


def test_proposed_sizes_divide_a_tied_parameter_under_each_of_its_names() -> None:
    found = finding(rules("'{a,b}': colwise", "c: colwise"), Shared, mesh_of(tp=3))
    assert found.message.startswith("dimension 0 of c.weight is 10")
    assert found.help == "tp can be 1, 2 (the common divisors of the sizes that it splits: 10, 6)"


def test_packings_that_do_not_add_up_propose_sizes_each_for_itself() -> None:
    text = rules(
        "layers.*.attention.wq: {style: colwise, packed: [1, 6]}",
        "layers.*.feed_forward.w1: {style: colwise, packed: [1, 6]}",
    )
    first, second = findings(text, llama(), TP)
    assert first.help is not None and second.help is not None
    assert "common" not in first.help and "common" not in second.help


def test_a_style_switched_off_is_as_if_nobody_had_written_it() -> None:
    text = rules(
        "inner.up: colwise", "layers: {style: fsdp, optional: true}", '"": fsdp', "inner: checkpoint"
    )
    off = {"fsdp": StyleDefaults(off=True), "checkpoint": StyleDefaults(off=True)}
    program = pz.compile(plan(text), on_meta(MLP), TP, defaults=off)
    assert [a.style for a in program] == ["colwise"]


def test_layouts_are_resolved_wherever_a_placement_stands() -> None:
    text = "layouts: {stream: shard(1), whole: replicate}\n" + rules(
        "inner: {style: prepare-io, input: {x: stream -> whole}, output: stream}", "inner.up: {style: colwise, input: stream}",
        "inner.down: {style: shard-params, params: {weight: whole, bias: {tp: whole}}}", "after: {style: colwise, output: whole}",
    )  # fmt: skip
    found = {a.module: a.options for a in compiled(text, MLP, TP)}
    assert found["inner"]["input"] == {"x": Flow(shard(1), REPLICATE)}
    assert found["inner"]["output"] == {"": Flow(None, shard(1))}
    assert found["inner.down"]["params"] == {"weight": {"": REPLICATE}, "bias": {"tp": REPLICATE}}


def test_an_unknown_layout_is_reported_where_it_stands() -> None:
    text = "layouts: {stream: shard(1)}\n" + rules(
        "inner: {style: prepare-input, input: {x: steam -> replicate}}", "after: colwise"
    )
    found = finding(text, MLP, TP)
    assert (found.code, found.help) == ("unknown-layout", "did you mean stream? the layouts are stream")
    assert marked(text, found) == "steam"


# Axes


def test_styles_without_an_axis_above_1_do_nothing() -> None:
    text = rules("inner.up: colwise", "inner: {style: prepare-input, input: replicate}", '"": fsdp')
    assert len(compiled(text, MLP)) == 0
    assert [a.style for a in compiled(text, MLP, mesh_of(dp_shard=2))] == ["fsdp"]


def test_context_parallel_stands_on_cp_alone() -> None:
    text = rules("inner: {style: context-parallel, axis: tp}", "after: colwise")
    found = finding(text, MLP, TP)
    assert (found.code, found.message, found.help) == (
        "unknown-axis",
        "context-parallel does not use tp",
        "it uses cp",
    )
    assert marked(text, found) == "axis"


def test_what_is_wrong_in_the_same_way_is_reported_once() -> None:
    text = rules(
        "layers.*.attention.w[qk]: {style: colwise, packed: [1, 7]}",
        "layers.*.feed_forward.w1: {style: colwise, packed: [1, 6]}",
    )
    found = findings(text, llama(n_layers=3), TP)
    assert [d.code for d in found] == ["not-divisible", "not-divisible"]
    first, second = (d.message for d in found)
    assert first.startswith("a part of layers.0.attention.wq.weight is 3,") and first.endswith(
        " (5 more like it)"
    )
    assert second.startswith("dimension 0 of layers.0.feed_forward.w1.weight is 40,") and second.endswith(
        " (2 more like it)"
    )


# FSDP


def units(text: str, mesh: Mesh, **options: Any) -> dict[str, Any]:
    return {a.module: a for a in compiled(text, llama(), mesh, options={"fsdp": options}).of_slot("fsdp")}


LLAMA = "extends: llama"


def test_units_are_drawn_innermost_first() -> None:
    found = units(LLAMA, mesh_of(dp_shard=2))
    assert list(found) == ["layers.0", "layers.1", "tok_embeddings", "output", ""]
    assert list(found[""].params) == ["norm.weight"]
    assert "attention.wq.weight" in found["layers.0"].params


@pytest.mark.parametrize(
    ("sizes", "axes", "folded"),
    [
        ({"dp_shard": 2}, ("dp_shard",), "dp_shard"),
        ({"cp": 2}, ("cp",), "cp"),
        ({"dp_shard": 2, "cp": 2}, ("dp_shard", "cp"), "dp_shard+cp"),
        ({"dp_replicate": 2}, ("dp_replicate",), "dp_shard"),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, ("dp_replicate", "dp_shard"), "dp_shard"),
    ],
)
def test_units_stand_on_the_data_axes_folded(
    sizes: dict[str, int], axes: tuple[str, ...], folded: str
) -> None:
    root = units(LLAMA, mesh_of(**sizes))[""]
    assert root.axes == axes
    assert {axis for by_axis in root.params.values() for axis in by_axis} == {folded}


def test_a_single_rank_has_units_only_for_precision_and_offload() -> None:
    assert units(LLAMA, Mesh({})) == {}
    assert units(LLAMA, Mesh({}), param_dtype="float32") == {}
    every = ["layers.0", "layers.1", "tok_embeddings", "output", ""]
    assert list(units(LLAMA, Mesh({}), param_dtype="bfloat16")) == every
    assert list(units(LLAMA, mesh_of(tp=2), cpu_offload=True)) == every


def test_the_dimension_is_chosen_after_tensor_styles() -> None:
    found = units(LLAMA, mesh_of(dp_shard=2, tp=2), shard_dim="largest")["layers.0"].params
    assert found["attention.wq.weight"] == {"dp_shard": shard(1)}
    assert found["attention.wo.weight"] == {"dp_shard": shard(0)}
    assert found["feed_forward.w2.weight"] == {"dp_shard": shard(0)}


def test_reasons_are_told() -> None:
    root = units(LLAMA, mesh_of(dp_shard=2), min_size=100)[""]
    assert root.reasons == {"norm.weight": "too small"}
    assert root.params["norm.weight"] == {"dp_shard": REPLICATE}


def test_options_may_differ_by_unit() -> None:
    text = "extends: llama\nrules:\n  layers.1: {style: fsdp, reshard_after_forward: false}"
    found = units(text, mesh_of(dp_shard=2), reshard_after_forward=True)
    assert [found[name].options["reshard_after_forward"] for name in ("layers.0", "layers.1")] == [
        True,
        False,
    ]


def test_modules_without_parameters_can_be_units() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Dropout(0.0), nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x))

    program = compiled(rules("a: fsdp", '"": fsdp'), Empty, mesh_of(dp_shard=2))
    assert [(a.module, list(a.params)) for a in program] == [("a", []), ("", ["b.weight", "b.bias"])]
