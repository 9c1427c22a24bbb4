"""Plans: what the good ones mean, and that every mistake of the bad ones is found in its columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.diagnostics.diagnostic import Findings, Span
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.load import load
from parallelizer.language.parse_plan import parse_layouts, parse_plan, section
from parallelizer.language.plan import PARTIAL, REPLICATE, SLOTS, Flow, Plan, Rule, shard
from parallelizer.language.yaml_nodes import MappingNode, read

PLANS = Path(__file__).parents[1] / "plans"
GOOD = sorted(path.stem for path in (PLANS / "good").glob("*.yaml"))


def find(name: str, span: Span | None) -> str:
    """A plan of `tests/plans/good`, or a shipped one that it extends."""
    own = PLANS / "good" / f"{name}.yaml"
    return str(own if own.is_file() else config_folder() / "plans" / own.name)


def parsed(text: str, parent: Plan | None = None) -> tuple[Plan, Findings]:
    node = read(text, "p.yaml")
    assert isinstance(node, MappingNode)
    findings = Findings()
    return parse_plan(node, parent or Plan("p", "p.yaml"), findings), findings


def rules_of(plan: Plan) -> dict[str, Rule]:
    return {rule.key: rule for rule in plan.rules}


@pytest.mark.parametrize("name", GOOD)
def test_good_plans_parse(name: str) -> None:
    assert load(name, find).rules


def test_every_option_becomes_a_value_of_its_kind() -> None:
    plan = load("every_option", find)
    assert plan.layouts == {"stream": shard(1), "whole": REPLICATE, "sums": PARTIAL, "last-dim": shard(-1)}
    options = {
        key: [{name: option.value for name, option in use.options.items()} for use in rule.uses]
        for key, rule in rules_of(plan).items()
    }
    stream = plan.rules[0].uses[0].options["output"].value[""].wanted
    assert (stream.kind, stream.name) == ("layout", "stream")

    def said(flows: dict[str, Flow]) -> dict[str, str]:
        return {name: str(flow) for name, flow in flows.items()}

    embed = options["embed"][0]
    assert said(embed["input"]) == {"": "replicate"} and embed["input"][""].wanted is None
    assert said(embed["output"]) == {"": "stream"} and embed["output"][""].arrives is None
    assert (embed["local"], embed["axis"]) == (False, "tp")
    fused = options["layers.*.wqkv"][0]
    assert fused["packed"] == ("q_size", "kv_size", "kv_size")
    assert fused["divide"] == ("num_heads", "num_kv_heads")
    up = options["layers.*.up"][0]
    assert (up["packed"], up["divide"], said(up["input"])) == (
        (1, 1),
        ("num_heads",),
        {"x": "stream -> whole"},
    )
    experts = options["layers.*.experts"][0]
    assert experts["params"] == {
        "w1": {"tp": shard(1), "tp_outer": shard(0)},
        "w2": {"tp_outer": shard(0), "tp": shard(2)},
        "bias": {"": REPLICATE},
    }
    assert said(experts["input"]) == {"x": "stream -> replicate", "mask": "replicate"}
    assert said(experts["output"]) == {"0": "sums -> stream", "aux": "replicate"}
    assert options["layers.*.experts.gate"][0]["params"] == {"": {"": shard(0)}}
    assert options["layers.*.experts.scale"][0]["params"] == {"": {"tp": shard(0), "tp_outer": REPLICATE}}
    assert options["layers.*.router"] == [{"grad": "replicate", "axis": "tp_outer"}]
    assert options["layers.*.bias"] == [{}]
    mixer = options["layers.*.mixer"]
    assert mixer[0]["local"] is True and mixer[2] == {"keep_gathered": True} and mixer[3:] == [{}, {}]
    assert options["layers.{0..3}"] == [{"mode": "selective"}]
    assert options[""] == [
        {
            "reshard_after_forward": 8,
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "cpu_offload": False,
            "min_params": 1_000_000,
            "min_size": 1024,
            "shard_dim": "largest",
        }
    ]
    assert {name: (b.dim, b.make) for name, b in plan.batch.items()} == {
        "input_ids": (1, None),
        "labels": (1, None),
        "position_ids": (None, "positions"),
    }
    assert {name: b.dim for name, b in plan.buffers.items()} == {"rope.*": 0}


def test_none_empties_every_slot_one_or_several() -> None:
    rules = rules_of(load("every_option", find))
    assert rules["layers.8"].empties == frozenset(SLOTS) and rules["layers.8"].uses == ()
    assert rules["layers.9"].empties == {"fsdp"}
    assert rules["layers.10"].empties == {"checkpoint", "compile"}
    assert [use.style for use in rules["layers.{4..7}"].uses] == ["fsdp"]
    assert rules["layers.{4..7}"].empties == frozenset(SLOTS)


def test_optional_counts_for_the_whole_rule_wherever_it_stands() -> None:
    rules = rules_of(load("every_option", find))
    assert {key for key, rule in rules.items() if rule.optional} == {"layers.10", "layers.11", "**.maybe"}


def test_the_order_of_a_list_of_styles_means_nothing() -> None:
    one, _ = parsed("rules: {a: [fsdp, checkpoint, none]}")
    other, _ = parsed("rules: {a: [none, checkpoint, fsdp]}")
    assert {use.style for use in one.rules[0].uses} == {use.style for use in other.rules[0].uses}
    assert one.rules[0].empties == other.rules[0].empties


def test_rules_keep_their_order_and_know_their_keys() -> None:
    text = 'rules:\n  b: fsdp\n  "a.*": fsdp\n  b.c: {style: colwise, input: replicate}\n'
    plan, findings = parsed(text)
    assert not findings.items
    assert [rule.key for rule in plan.rules] == ["b", "a.*", "b.c"]
    lines = text.split("\n")
    for rule, written in zip(plan.rules, ("b", '"a.*"', "b.c"), strict=True):
        assert lines[rule.span.line - 1][rule.span.column - 1 : rule.span.end_column - 1] == written
    use = plan.rules[2].uses[0]
    assert lines[3][use.span.column - 1 : use.span.end_column - 1] == "colwise"
    option = use.options["input"]
    assert lines[3][option.span.column - 1 : option.span.end_column - 1] == "input"
    placement = option.value[""].arrives
    assert lines[3][placement.span.column - 1 : placement.span.end_column - 1] == "replicate"


def test_rules_go_behind_the_parents_and_layouts_and_buffers_are_merged_key_by_key() -> None:
    parent, _ = parsed(
        "layouts: {a: replicate, b: shard(0)}\nrules: {x: fsdp, y: fsdp}\n"
        "buffers: {batch: {i: 0, j: 1}, model: {k: 2}}"
    )
    child, findings = parsed(
        "layouts: {b: shard(1), c: partial}\nrules: {y: checkpoint, z: fsdp}\n"
        "buffers: {batch: {j: 2, l: positions}}",
        parent,
    )
    assert not findings.items
    assert [(rule.key, rule.uses[0].style) for rule in child.rules] == [
        ("x", "fsdp"),
        ("y", "fsdp"),
        ("y", "checkpoint"),
        ("z", "fsdp"),
    ]
    assert child.layouts == {"a": REPLICATE, "b": shard(1), "c": PARTIAL}
    assert {name: b.make or b.dim for name, b in child.batch.items()} == {"i": 0, "j": 2, "l": "positions"}
    assert {name: b.dim for name, b in child.buffers.items()} == {"k": 2}


@pytest.mark.parametrize("nothing", ["", "null", "~", "{}"])
@pytest.mark.parametrize("key", ["layouts", "rules", "buffers"])
def test_a_section_may_stand_empty(key: str, nothing: str) -> None:
    plan, findings = parsed(f"version: 1\n{key}: {nothing}\n")
    assert not findings.items
    assert plan == Plan("p", "p.yaml")


@pytest.mark.parametrize("version", ["1", '"1"', "'1'"])
def test_the_version_may_be_quoted(version: str) -> None:
    assert not parsed(f"version: {version}")[1].items


@pytest.mark.parametrize("version", ["1.0", "01", "one", "", "[1]", "null"])
def test_another_version_is_refused(version: str) -> None:
    [found] = parsed(f"version: {version}")[1].items
    assert found.code == "plan-version"


def test_mistakes_in_one_rule_do_not_hide_those_in_others() -> None:
    _, findings = parsed(
        "rules: {a: fdsp, b..c: {style: x, y: z}, d: [fsdp, fsdp]}\nbuffers: {batch: {e: f}}"
    )
    assert [found.code for found in findings.items] == [
        "wrong-type",
        "unknown-style",
        "bad-glob",
        "unknown-style",
        "slot-twice",
    ]


def test_too_many_rules_are_refused() -> None:
    _, findings = parsed("rules:\n" + "".join(f"  m{i}: fsdp\n" for i in range(1001)))
    [found] = findings.items
    assert found.code == "plan-limit" and found.span is not None and found.span.line == 1002


def test_layouts_are_read_alone_too() -> None:
    node = read("{a: replicate, b: a}", "<override>")
    assert isinstance(node, MappingNode)
    findings = Findings()
    assert parse_layouts(node, findings) == {"a": REPLICATE}
    assert [found.code for found in findings.items] == ["unknown-placement"]


def test_a_section_of_another_kind_is_reported_once() -> None:
    node = read("rules: [a]", "p.yaml")
    assert isinstance(node, MappingNode)
    findings = Findings()
    assert section(node, "rules", findings).entries == ()
    assert section(node, "layouts", findings).entries == ()
    assert len(findings.items) == 1
