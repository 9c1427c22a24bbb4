"""`explain PATH`: rules, winners, where values come from, and placements; held to the compiler's own program."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from parallelizer.commands.main import main
from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.compiler.wording import dims
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import Mesh
from parallelizer.language.styles import STYLES
from parallelizer.report.documents import explain_document
from parallelizer.report.explanation import Answer, explain
from parallelizer.report.text.explanation import explain_path
from tests.findings import compiled

Captured = pytest.CaptureFixture[str]


@cache
def setup(*overrides: str) -> Setup:
    return from_config(*compose_config(overrides))


@cache
def answer(word: str, *overrides: str) -> Answer:
    return explain(setup(*overrides), word)


def shown(word: str, *overrides: str) -> str:
    stream = io.StringIO()
    explain_path(setup(*overrides), word, stream, width=120)
    return stream.getvalue()


def test_a_module_is_explained_from_rule_to_placement() -> None:
    text = shown("layers.1.attention.wq", "parallel=fsdp2_tp2")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "layers.1.attention.wq" and lines[1] == "Linear; plan llama on dp_shard=2 x tp=2"
    [rule] = [line for line in lines if line.startswith("layers.*.attention.w[qkv]")]
    assert rule.split(" ", 1)[1].startswith("params: wins ") and ".yaml:" in rule
    assert "output shard(-1) the style's default" in lines
    assert "layers.1.attention.wq.weight 256x256 64x256 (tp x dp_shard, -)" in lines
    assert any(line.startswith("sharded and gathered by fsdp with layers.1, by ") for line in lines)


def test_placements_are_by_dimension() -> None:
    text = shown("layers.0.attention.wo", "parallel=fsdp2_tp2")
    assert "(dp_shard, tp)" in text
    assert "(-, tp)" in shown("layers.0.attention.wo.weight", "parallel=tp2")


@pytest.mark.parametrize(
    "overrides", [("parallel=fsdp2_cp2_tp2",), ("parallel=hsdp2x2",), ("parallel=single",)]
)
def test_every_parameter_is_placed_as_the_program_says(overrides: tuple[str, ...]) -> None:
    """Against the sizes: what the axes of a dimension multiply to is what the dimension is divided by."""
    asked = setup(*overrides)
    model = asked.build_model()
    sizes = asked.mesh.sizes
    for one in explain(asked, "**.weight").explanations:
        for shard in one.parameters:
            for dim, axes in enumerate(dims(shard)):
                ranks = 1
                for axis in axes.replace(" x ", "+").split("+"):
                    ranks *= sizes[axis] if axis != "-" else 1
                assert shard.global_shape[dim] == shard.local_shape[dim] * ranks
    named = {s.name for one in explain(asked, "**").explanations for s in one.parameters}
    assert named == {s.name for s in parameter_shards(asked.compile(model), model)}


def test_rules_that_lose_say_to_which() -> None:
    rules = (
        'rules=["layers.*.attention.wq: rowwise","layers.0.attention.wq: none",'
        '"layers.0.attention.wq.weight: {style: shard-params, params: shard(0)}"]'
    )
    [first, second] = answer("layers.*.attention.wq", "parallel=tp2", rules).explanations
    outcomes = [[(s, o if isinstance(o, str) else o.key) for s, o in m.outcomes] for m in first.rules]
    assert outcomes == [
        [("params", "layers.0.attention.wq.weight")],
        [("params", "layers.0.attention.wq.weight")],
        [("every slot", "empties")],
        [("params", "wins")],
    ]
    [filled] = first.slots
    assert (filled.style, filled.effect, filled.axes) == ("shard-params", "applied", ("tp",))
    assert [m.outcomes for m in second.rules][-1] == (("params", "wins"),)
    assert second.slots[0].style == "rowwise"


def test_io_is_a_slot_for_each_axis() -> None:
    style = "layers.0.attention: {style: prepare-input"
    rules = [
        style + ", input: {x: stream -> replicate}}",
        style + ", axis: cp, input: {x: shard(1) -> replicate}}",
    ]
    [one] = answer("layers.0.attention", "parallel=tp2", f"rules={json.dumps(rules)}").explanations
    taken = [[(s, o if isinstance(o, str) else o.span.column) for s, o in m.outcomes] for m in one.rules]
    assert [[slot for slot, _ in outcomes] for outcomes in taken] == [
        ["io on tp"],
        ["io on tp"],
        ["io on cp"],
    ]
    assert isinstance(taken[0][0][1], int) and taken[0][0][1] == one.rules[1].rule.span.column
    assert [taken[1][0][1], taken[2][0][1]] == ["wins", "wins"]


def test_where_each_value_comes_from() -> None:
    rule = 'rules=["layers.0: {style: fsdp, shard_dim: largest}"]'
    overrides = ("parallel=fsdp2", "++parallel.styles.fsdp.min_size=7", rule)
    [one] = answer("layers.0", *overrides).explanations
    fsdp = next(slot for slot in one.slots if slot.slot == "fsdp")
    values = {v.name: (v.text, v.source, str(v.span.file) if v.span else None) for v in fsdp.values}
    assert values["shard_dim"] == ("largest", "rule", f"<override {overrides[2]}>")
    assert values["min_size"] == ("7", "preset", f"<override {overrides[1]}>")
    assert values["cpu_offload"] == ("false", "default", None)
    text, source, file = values["param_dtype"]  # an interpolation: the place of what it names
    assert (text, source) == ("float32", "preset") and Path(file or "").name == "train.yaml"
    text, source, file = values["reduce_dtype"]
    assert (text, source) == ("float32", "preset") and Path(file or "").name == "base.yaml"


def test_a_layout_is_said_with_the_place_that_set_it() -> None:
    assert "stream -> replicate}  (stream is shard(1), " in shown("layers.0.attention", "parallel=tp2")
    text = shown("layers.0.attention", "parallel=tp2", "++parallel.layouts.stream=replicate")
    assert "(stream is replicate, the override ++parallel.layouts.stream=replicate)" in text


def test_a_style_on_axes_of_size_1_does_nothing() -> None:
    [one] = answer("norm", "parallel=fsdp2").explanations
    assert (one.slots[0].effect, one.slots[0].reason.split(",")[0]) == ("no-op", "tp is 1")
    [root] = answer("(root)", "parallel=tp2").explanations
    assert root.slots[0].effect == "no-op" and root.slots[0].reason.startswith(
        "dp_replicate, dp_shard and cp are 1"
    )
    [inner] = answer("layers.0.attention.inner", "parallel=tp2").explanations
    assert inner.slots[0].reason.startswith("cp is 1")


def test_a_style_that_a_preset_switches_off() -> None:
    [one] = answer("layers.0", "parallel=fsdp2", "++parallel.styles.fsdp=null").explanations
    fsdp = next(slot for slot in one.slots if slot.slot == "fsdp")
    assert fsdp.effect == "off" and not one.units
    assert "the override ++parallel.styles.fsdp=null" in fsdp.reason


def test_globs_and_folded_paths_are_accepted_and_what_is_alike_is_said_once() -> None:
    text = shown("layers.*.attention.{wk,wv}", "parallel=tp2")
    assert text.count("params  colwise") == 1 and "layers.{0,1}.attention.{wk,wv}\n  4 alike" in text
    folded = fold_paths(e.path for e in answer("layers.*.attention.{wk,wv}", "parallel=tp2").explanations)
    assert [e.path for e in answer(folded[0], "parallel=tp2").explanations] == [
        f"layers.{i}.attention.{n}" for i in range(2) for n in ("wk", "wv")
    ]


def test_a_parameter_by_name_and_a_module_without_rules() -> None:
    [one] = answer("layers.0.ffn_norm.weight", "parallel=tp2").explanations
    assert one.parameter == "weight" and [s.name for s in one.parameters] == ["layers.0.ffn_norm.weight"]
    assert "no rule matches it" in shown("layers", "parallel=tp2")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x))
        return y


def test_a_tied_parameter_is_found_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Tied()
    monkeypatch.setattr(Setup, "build_model", lambda self: model)
    asked = setup("plan=llama")
    program = compiled("rules: {'': fsdp}", Tied, Mesh({"dp_shard": 2}))
    monkeypatch.setattr(Setup, "compile", lambda self, model, force=False: program)
    for name in ("a.weight", "b.weight"):
        [one] = explain(asked, name).explanations
        assert [s.name for s in one.parameters] == ["a.weight"]


def test_a_path_that_matches_nothing_names_the_nearest(capsys: Captured) -> None:
    assert main(["explain", "layers.*.attention.wqq"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "`layers.*.attention.wq` (matches 2)" in printed.err
    for word, said in (("a..b", "neither a path nor a glob"), ("zzz", "lists the modules")):
        with pytest.raises(PlanError, match=said):
            explain(setup(), word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("atention", "did you mean `**.attention` (matches 2)?"),
        ("attention", "did you mean `**.attention` (matches 2)?"),  # and no code that begins so
        ("layer.0", "did you mean `layers.0`?"),
        ("zzz", "the model has tok_embeddings, rope, layers, norm, output;"),
    ],
)
def test_a_path_that_is_not_there_is_told_near_ones(word: str, said: str, capsys: Captured) -> None:
    assert main(["explain", "--json", word]) == 1
    [found] = json.loads(capsys.readouterr().out)["diagnostics"]
    assert found["code"] == "unknown-path" and found["help"].startswith(said)


def test_a_plan_that_does_not_compile_is_explained_as_far_as_it_goes(capsys: Captured) -> None:
    assert main(["explain", "layers.0.attention.wq", "parallel=tp2", "train.seq_len=255"]) == 1
    printed = capsys.readouterr()
    assert "params: wins" in printed.out and "the plan does not compile" in printed.out
    assert "sequence-not-divisible" in printed.err


def test_the_json_document(capsys: Captured) -> None:
    assert main(["explain", "--json", "layers.*.attention.wo", "parallel=fsdp2_tp2"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [e["module"] for e in made["explanations"]] == ["layers.0.attention.wo", "layers.1.attention.wo"]
    one = made["explanations"][0]
    [rule] = one["rules"]
    assert rule["slots"] == [{"slot": "params", "outcome": "wins", "to": None}] and rule["line"] > 1
    assert one["slots"][0]["axis"] == "tp" and one["slots"][0]["effect"] == "applied"
    assert one["parameters"][0]["dimensions"] == ["dp_shard", "tp"]
    assert one["units"][0]["module"] == "layers.0" and made["mesh"]["tp"] == 2
    assert main(["explain", "--json", "nothing.here"]) == 1
    assert json.loads(capsys.readouterr().out)["diagnostics"][0]["code"] == "unknown-path"


def test_json_and_text_are_of_one_answer() -> None:
    made = explain_document(answer("layers.0.attention.wq", "parallel=tp2"))
    values = {o["name"]: o["value"] for o in made["explanations"][0]["slots"][0]["options"]}
    assert values == {"input": "replicate", "output": "shard(-1)", "local": "true", "axis": "tp"}


# --- the declared defaults are those that the styles really have ------------------------------------


def test_defaults_are_declared_for_options_that_there_are() -> None:
    for declared in STYLES.values():
        assert declared.defaults.keys() <= declared.options.keys(), declared.name


def test_declared_defaults_are_what_torch_does() -> None:
    def act(text: str, build: Any) -> Any:
        return compiled(text, build, Mesh({"tp": 2})).applications[0].act

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.e = nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4)

    colwise = act("rules: {a: colwise}", Model)
    assert isinstance(colwise, ColwiseParallel) and colwise.use_local_output
    assert (colwise.input_layouts[0].is_replicate(), colwise.output_layouts[0].is_shard(-1)) == (True, True)
    rowwise = act("rules: {a: rowwise}", Model)
    assert isinstance(rowwise, RowwiseParallel) and rowwise.use_local_output
    assert (rowwise.input_layouts[0].is_shard(-1), rowwise.output_layouts[0].is_replicate()) == (True, True)
    assert act("rules: {e: rowwise}", Model).input_layouts[0].is_replicate()
    norm = act("rules: {n: sequence}", Model)
    assert (
        isinstance(norm, SequenceParallel)
        and not norm.use_local_output
        and norm.sequence_sharding[0].dim == 1
    )
