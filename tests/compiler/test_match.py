"""Which rule wins: the later one, slot by slot; and what is said of rules that win nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.compiler.match import taken_away
from parallelizer.language.plan import Mesh, shard
from tests.findings import compiled, finding, findings, marked, mesh_of, on_meta
from tests.styles.models import Mlp, around

TP = mesh_of(tp=2)
MLP = around(Mlp)
KEEP = "after: colwise"
"""A rule that always stands, so that the axis is used."""


def rules(*lines: str) -> str:
    return "rules:\n" + "".join(f"  {line}\n" for line in (*lines, KEEP))


def winners(text: str, **more: Any) -> dict[tuple[str, str], str]:
    """Styles by module and slot, without the rule that always stands."""
    program = compiled(text, MLP, TP, **more)
    return {(a.module, a.slot): a.style for a in program if a.module != "after"}


def test_the_later_rule_wins_a_slot() -> None:
    assert winners(rules("inner.*: colwise", "inner.down: rowwise")) == {
        ("inner.up", "params"): "colwise", ("inner.down", "params"): "rowwise",
    }  # fmt: skip
    assert winners(rules("inner.down: rowwise", "inner.{up,down}: colwise", "in*.down: rowwise")) == {
        ("inner.up", "params"): "colwise", ("inner.down", "params"): "rowwise",
    }  # fmt: skip


def test_a_rule_is_replaced_whole() -> None:
    text = rules("in*.up: {style: colwise, output: replicate}", "inner.up: colwise")
    (up,) = (a for a in compiled(text, MLP, TP) if a.module == "inner.up")
    assert up.options == {}


def test_slots_are_won_one_by_one() -> None:
    text = rules(
        "in*.up: [colwise, checkpoint]",
        "inner.up: {style: checkpoint, mode: selective}",
        "inner.*: {style: fsdp, cpu_offload: true}",
    )
    assert winners(text) == {
        ("inner.up", "params"): "colwise", ("inner.up", "checkpoint"): "checkpoint",
        ("inner.up", "fsdp"): "fsdp", ("inner.down", "fsdp"): "fsdp",
    }  # fmt: skip


def test_io_is_one_slot_for_each_axis() -> None:
    text = rules(
        "in?er: {style: prepare-input, input: replicate}", "i*r: {style: prepare-io, axis: tp_outer, input: replicate}",
        "inner: {style: prepare-output, output: replicate}",
    )  # fmt: skip
    found = [(a.style, a.axes) for a in compiled(text, MLP, mesh_of(tp_outer=2, tp=2)) if a.slot == "io"]
    assert found == [("prepare-output", ("tp",)), ("prepare-io", ("tp_outer",))]


def test_none_empties_every_slot_or_the_named_ones() -> None:
    three = "in*.up: [colwise, checkpoint, {style: fsdp, cpu_offload: true}]"
    assert winners(rules(three, "inner.*: none")) == {}
    assert winners(rules(three, "inner.up: {none: fsdp}")) == {
        ("inner.up", "params"): "colwise", ("inner.up", "checkpoint"): "checkpoint",
    }  # fmt: skip
    assert winners(rules(three, "inner.up: {none: [params, checkpoint]}")) == {("inner.up", "fsdp"): "fsdp"}
    assert winners(rules(three, "inner.?p: none", "inner.up: checkpoint")) == {
        ("inner.up", "checkpoint"): "checkpoint"
    }


def test_a_parameter_may_be_named() -> None:
    weight = "inner.up.weight: {style: shard-params, params: shard(0)}"
    both = "inner.up.{weight,bias}: {style: shard-params, params: shard(0)}"
    program = compiled(rules(both), MLP, TP)
    assert [(a.module, dict(a.params)) for a in program.of_slot("params")][:2] == [
        ("inner.up", {"bias": {"tp": shard(0)}}), ("inner.up", {"weight": {"tp": shard(0)}}),
    ]  # fmt: skip
    # Only what was given to it by name is taken away from a parameter.
    assert winners(rules(both, "inner.up: checkpoint", "inner.up.weight: none")) == {
        ("inner.up", "params"): "shard-params", ("inner.up", "checkpoint"): "checkpoint",
    }  # fmt: skip
    # A style for the whole module takes the place of those of single parameters.
    assert winners(rules(weight, "inner.up: colwise")) == {("inner.up", "params"): "colwise"}


class Both(nn.Module):
    """A module and a parameter whose names end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(2, 2), nn.Module()
        self.w.a = nn.Parameter(torch.empty(2, 2))
        self.w.reset_parameters = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_module_is_meant_before_a_parameter() -> None:
    program = compiled(
        'rules: {"**.a": {style: replicate}, w.a: {style: shard-params, params: shard(0)}}', Both, TP
    )
    assert [(a.module, list(a.params)) for a in program] == [("a", ["weight", "bias"]), ("w", ["a"])]


def test_an_alternative_that_names_a_parameter_beside_one_that_names_a_module_is_refused() -> None:
    found = finding('rules: {"{a,w.a}": {style: replicate}}', Both, TP)
    assert (found.code, found.message.partition(",")[0]) == ("unmatched-alternative", "`w.a`")


# Rules that match nothing


@pytest.mark.parametrize(
    ("rule", "code", "mark", "message", "help_text"),
    [
        ("iner.up: colwise", "unmatched-glob", "iner.up", "`iner.up` matches no module", "did you mean `inner.up` (matches 1)?"),
        ("nothing.at.all: colwise", "unmatched-glob", "nothing.at.all", "`nothing.at.all` matches no module",
         "the model has after, before, inner"),
        ("'*up': colwise", "unmatched-glob", "'*up'", "`*up` matches no module",
         "`*` matches within one segment only; did you mean `inner.*up` (matches 1)?"),
        ("'*.up.wieght': {style: shard-params, params: shard(0)}", "unmatched-glob", "'*.up.wieght'",
         "`*.up.wieght` matches no module", "did you mean `*.up.weight` (matches 1)?"),
        ('"inner.{up,dwn}": colwise', "unmatched-alternative", "dwn",
         "`inner.dwn`, one alternative of `inner.{up,dwn}`, matches no module", "did you mean `inner.down`?"),
        ('"{inner.up,h.{0..63}.wq}": colwise', "unmatched-alternative", "h.{0..63}.wq",
         "`h.{0..63}.wq`, alternatives of `{inner.up,h.{0..63}.wq}`, match no module", "remove them from the braces"),
        ('"inner.{up,dwn,don}": colwise', "unmatched-alternative", '"inner.{up,dwn,don}"',
         "`inner.{dwn,don}`, alternatives of `inner.{up,dwn,don}`, match no module", "did you mean `inner.down`?"),
    ],
)  # fmt: skip
def test_a_rule_that_matches_nothing_is_an_error_with_a_suggestion(
    rule: str, code: str, mark: str, message: str, help_text: str
) -> None:
    found = finding(rules(rule), MLP, TP)
    assert (found.code, found.severity, found.message, found.help) == (code, "error", message, help_text)
    assert marked(rules(rule), found) == mark


def test_a_star_that_was_to_cross_segments_is_told_what_does() -> None:
    """As somebody writes who comes from regular expressions, on an encoder of Hugging Face's."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList(
                nn.ModuleDict(
                    {"attention": nn.ModuleDict({"self": nn.ModuleDict({"query": nn.Linear(4, 4)})})}
                )
                for _ in range(12)
            )

    found = finding("rules: {'*self.query': colwise}", Encoder, TP)
    assert found.help == "`*` matches within one segment only; did you mean `**.self.query` (matches 12)?"


def test_optional_lets_a_rule_match_nothing() -> None:
    assert findings(rules("iner.up: {style: colwise, optional: true}"), MLP, TP) == ()
    assert findings(rules('"inner.{up,dwn}": {style: colwise, optional: true}'), MLP, TP) == ()


def test_a_style_for_modules_refuses_a_parameter() -> None:
    text = rules("inner.up.weight: colwise")
    found = finding(text, MLP, TP)
    assert (found.code, found.help) == ("style-on-parameter", "match its module: inner.up")
    assert marked(text, found) == "colwise"


def test_the_plan_of_another_model_is_one_finding() -> None:
    strange = (
        "tokens: rowwise",
        "layers.*.wq: colwise",
        "layers.*.wo: rowwise",
        "layers.{0,1}.w[12]: colwise",
        '"": fsdp',
    )
    text = rules(*strange)
    found = finding(text, MLP, TP)
    assert found.code == "unmatched-glob" and marked(text, found) == "tokens"
    assert found.message == "4 of 5 rules match no module: this is the plan of another model"
    assert found.help and found.help.startswith("the model has after, before, inner") and "init" in found.help
    assert len(findings(rules(*strange[:3], "inner.up: colwise"), MLP, TP)) == 3  # two of five match


def test_all_unmatched_rules_are_reported_at_once_and_with_other_mistakes() -> None:
    found = findings(rules("a: colwise", "b: colwise", "inner.up: {style: colwise, packed: [1, 4]}"), MLP, TP)
    assert [d.code for d in found] == ["unmatched-glob", "unmatched-glob", "not-divisible"]


# Rules that win nothing


def test_a_rule_that_never_wins_is_reported_with_the_one_that_does() -> None:
    text = rules("inner.up: colwise", "inner.down: rowwise", "inner.*: replicate")
    found = findings(text, MLP, TP)
    assert [(d.code, d.severity, marked(text, d)) for d in found] == [
        ("shadowed-rule", "warning", "inner.up"), ("shadowed-rule", "warning", "inner.down"),
    ]  # fmt: skip
    assert [[marked(text, r.span) for r in d.related] for d in found] == [["inner.*"], ["inner.*"]]


def test_a_rule_that_wins_somewhere_or_some_slot_is_not_reported() -> None:
    assert findings(rules("inner.*: colwise", "inner.down: rowwise"), MLP, TP) == ()
    assert findings(rules("in*.up: [colwise, checkpoint]", "inner.up: replicate"), MLP, TP) == ()
    assert findings(rules("in*.up: {style: colwise, optional: true}", "inner.up: replicate"), MLP, TP) == ()


def test_what_is_emptied_is_shadowed_too() -> None:
    text = rules("inner.up: colwise", "inner.*: none")
    found = finding(text, MLP, TP)
    assert (found.code, marked(text, found), marked(text, found.related[0].span)) == (
        "shadowed-rule",
        "inner.up",
        "inner.*",
    )


def test_none_that_finds_nothing_to_empty_is_reported() -> None:
    text = rules("inner.*: none")
    found = finding(text, MLP, TP)
    assert (found.code, found.severity, found.message) == (
        "shadowed-rule",
        "warning",
        "`inner.*` has no slot to empty",
    )
    assert findings(rules("inner.*: {none: fsdp, optional: true}"), MLP, TP) == ()


def test_a_plan_that_extends_another_may_replace_its_rules(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "parent.yaml").write_text(rules("inner.up: colwise"))
    (tmp_path / "plans" / "child.yaml").write_text("extends: parent\nrules: {inner.up: replicate}")
    program = pz.compile(pz.load_plan("child", [tmp_path]), on_meta(MLP), TP)
    assert program.diagnostics == ()
    child = "extends: parent\nrules: {inner.up: replicate, inner.*: replicate}"
    (tmp_path / "plans" / "child.yaml").write_text(child)
    [found] = pz.compile(pz.load_plan("child", [tmp_path]), on_meta(MLP), TP).diagnostics
    assert (found.code, found.severity) == ("shadowed-rule", "warning") and "`inner.up`" in found.message


# Names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))  # type: ignore[no-any-return]


def test_a_tied_parameter_is_matched_under_each_of_its_names() -> None:
    text = "rules: {'{table,out}.weight': {style: shard-params, params: shard(0)}}"
    assert [a.module for a in compiled(text, Tied, Mesh({"tp": 2}))] == ["table", "out"]


@pytest.mark.parametrize(
    ("later", "taken"),
    [
        ("inner.up: none", ["this rule removes `colwise`"]),
        ("inner.*: {none: params}", ["this rule removes `colwise`"]),
        ("inner.*: {none: fsdp}", []),
        ("inner.down: none", []),
        ("inner.up: none\n  inner.{up,down}: replicate", []),
    ],
)
def test_a_rule_that_takes_a_style_away_is_found(later: str, taken: list[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"rules:\n  inner.up: colwise\n  {later.replace('inner.up:', 'inner.[u]p:')}\n")
    rules = pz.load_plan(plan).rules
    assert [r.label for r in taken_away(rules, ["inner.up"])] == taken
    assert all(r.span == rules[1].span for r in taken_away(rules, ["inner.up"]))
    assert taken_away(rules[:1], ["inner.up"]) == ()
