"""Single rules: bodies, slots, and rules that stand in a list as texts or maps."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import Findings, Span
from parallelizer.language.parse_rule import data_only, parse_rule_item, parse_rules, quoted_rules, slot_of
from parallelizer.language.plan import SLOTS, Rule
from parallelizer.language.styles import STYLES
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, SequenceNode, read


def items(text: str) -> tuple[Node, ...]:
    node = read(text, "preset.yaml")
    assert isinstance(node, SequenceNode)
    return node.items


def parsed(text: str) -> tuple[tuple[Rule, ...], Findings]:
    """The rules of a list in YAML."""
    findings = Findings()
    return tuple(rule for item in items(text) for rule in parse_rule_item(item, findings)), findings


def cut(text: str, span: Span | None) -> str:
    assert span is not None
    return text.split("\n")[span.line - 1][span.column - 1 : span.end_column - 1]


@pytest.mark.parametrize("style", sorted(set(STYLES) - {"shard-params"}))
def test_every_style_may_stand_alone(style: str) -> None:
    (rule,), findings = parsed(f"- a: {style}")
    assert not findings.items
    assert [use.style for use in rule.uses] == [style] and not rule.empties
    assert slot_of(rule.uses[0])[0] == STYLES[style].slot in SLOTS


def test_io_is_a_slot_for_each_axis() -> None:
    text = (
        "- a: [{style: prepare-input, input: replicate}, {style: prepare-input, input: replicate, axis: cp}]"
    )
    (rule,), findings = parsed(text)
    assert not findings.items
    assert [slot_of(use) for use in rule.uses] == [("io", "tp"), ("io", "cp")]


@pytest.mark.parametrize(
    "text",
    [
        "- 'layers.*: checkpoint'",
        '- "layers.*: checkpoint"',
        "- layers.*: checkpoint",
        "- {layers.*: checkpoint}",
        "- {layers.*: {style: checkpoint}}",
        "- 'layers.*: {style: checkpoint}'",
        "- '{layers.*: [checkpoint]}'",
        "- |\n  layers.*: checkpoint\n",
        '- "\\"layers.*\\": checkpoint"',
    ],
)
def test_a_rule_in_a_list_is_a_text_or_a_map(text: str) -> None:
    rules, findings = parsed(text)
    assert not findings.items
    assert [(rule.key, [use.style for use in rule.uses]) for rule in rules] == [("layers.*", ["checkpoint"])]


def test_one_item_may_hold_several_rules() -> None:
    rules, findings = parsed("- {a: fsdp, b: fsdp}\n- 'c: fsdp'\n- |\n  d: fsdp\n  e: fsdp\n")
    assert not findings.items
    assert [rule.key for rule in rules] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("text", "code", "wrong"),
    [
        ("- 'layers.*: {style: chekpoint}'", "unknown-style", "chekpoint"),
        ('- "layers.*: {style: checkpoint, mod: full}"', "unknown-option", "mod"),
        ("- layers.*: {style: checkpoint, mode: ful}", "unknown-value", "ful"),
        ("- 'layers..x: fsdp'", "bad-glob", "."),
        ("- '0: fsdp'", "yaml-retyped", "0"),
        ("- 0: fsdp", "yaml-retyped", "0"),
        ("- '*.wq: fsdp'", "unquoted-glob", "*.wq"),
        ("- 'a: {style: rowwise, output: shard(x)}'", "unknown-placement", "shard(x)"),
        ("- 'a: b: c'", "yaml-syntax", ":"),
        ("- 'layers.*: ${x}'", "interpolation", "${x}"),
        ("- 'layers.*: {style: ${x}}'", "interpolation", "${x}"),
        ("- ${x}", "interpolation", "${x}"),
        ("- layers.*: [fsdp, '${x}']", "interpolation", "${x}"),
        ("- '${x}: fsdp'", "interpolation", "${x}"),
        ("- a: {style: fsdp, _target_: os.system}", "not-data", "_target_"),
        ("- fsdp", "wrong-type", "fsdp"),
        ("- layers.*:fsdp", "wrong-type", "layers.*:fsdp"),
        ("- ''", "wrong-type", "''"),
        ("- 3", "wrong-type", "3"),
        ("- {}", "wrong-type", "{}"),
        ("- [a]", "wrong-type", "[a]"),
        ("- '[a]'", "wrong-type", "'[a]'"),
        ('- "layers.*: {style: \\x63hek}"', "unknown-style", '"layers.*: {style: \\x63hek}"'),
    ],
)
def test_a_mistake_in_a_list_is_found_in_its_columns(text: str, code: str, wrong: str) -> None:
    rules, findings = parsed(text)
    [found] = findings.items
    assert not rules
    assert (found.code, cut(text, found.span)) == (code, wrong)
    assert found.help


def test_a_colon_without_a_blank_is_explained() -> None:
    assert "write a blank after the colon" in (parsed("- layers.*:fsdp")[1].items[0].help or "")
    assert "write a blank" not in (parsed("- layers.*")[1].items[0].help or "")


def test_a_mistake_in_one_rule_leaves_the_others() -> None:
    rules, findings = parsed("- 'a: fdsp'\n- 'b: fsdp'\n- c: {style: fsdp, mode: full}\n- d: none\n")
    assert [rule.key for rule in rules] == ["b", "d"]
    assert [found.code for found in findings.items] == ["unknown-style", "unknown-option"]


def test_what_is_data_is_left_as_it_is() -> None:
    node = read("{a: {style: fsdp}, b: [c, 'd e'], __: 1, _x: 2, $: 3}", "f")
    findings = Findings()
    assert node is not None and data_only(node, findings, maps=1) == node
    assert not findings.items


def test_half_a_rule_is_left_out_whole() -> None:
    node = read("rules: {a: {style: fsdp, mode: '${x}'}, b: fsdp}\nversion: '${y}'", "f")
    findings = Findings()
    assert node is not None
    kept = data_only(node, findings, maps=2)
    assert isinstance(kept, MappingNode)
    assert [key.text for key, _ in kept] == ["rules"]
    rules = kept.get("rules")
    assert isinstance(rules, MappingNode) and [key.text for key, _ in rules] == ["b"]
    assert len(findings.items) == 2


def test_a_rule_that_says_nothing_is_not_one() -> None:
    findings = Findings()
    node = read("{a: , b: {optional: true}}", "f")
    assert isinstance(node, MappingNode)
    assert parse_rules(node, findings) == ()
    assert [found.code for found in findings.items] == ["missing-style", "missing-style"]


def test_the_advice_for_the_command_line_is_what_hydra_and_the_shell_leave_alone() -> None:
    assert quoted_rules("rules", "a.w[qk]: {style: fsdp}") == "'rules=[\"a.w[qk]: {style: fsdp}\"]'"
    assert (
        quoted_rules("rules", "") == quoted_rules("rules", "'a': b") == "'rules=[\"layers.*: checkpoint\"]'"
    )


def test_a_text_that_was_not_found_in_its_file_has_the_place_of_the_whole() -> None:
    findings = Findings()
    span = Span("<override rules=...>", 1, 7, 20)
    assert parse_rule_item(Scalar("a: fdsp", False, span), findings) == ()
    assert [found.span for found in findings.items] == [span]
