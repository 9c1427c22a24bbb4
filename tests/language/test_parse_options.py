"""One converter for each kind of option: what it takes, what it refuses, and where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.diagnostics.diagnostic import Findings
from parallelizer.language import parse_options as options
from parallelizer.language.plan import AXES, REPLICATE, Flow, shard
from parallelizer.language.styles import STYLES, OptionKind
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, read


def node_of(text: str) -> Node:
    node = read(f"k: {text}", "f")
    assert isinstance(node, MappingNode)
    return node.entries[0][1]


def parse(kind: str, text: str, choices: tuple[str, ...] = ()) -> tuple[Any, Findings]:
    findings = Findings()
    return options.parse(OptionKind(kind, "", choices), node_of(text), findings), findings


GOOD = [
    ("bool", "true", True),
    ("bool", "False", False),
    ("int", "0", 0),
    ("int", "1024", 1024),
    ("int", "1_000_000", 1_000_000),
    ("int", "'12'", 12),
    ("bool-or-int", "true", True),
    ("bool-or-int", "4", 4),
    ("dtype", "bfloat16", "bfloat16"),
    ("axis", "tp_outer", "tp_outer"),
    ("names", "num_heads", ("num_heads",)),
    ("names", "[a, _b1]", ("a", "_b1")),
    ("parts", "[1, 1]", (1, 1)),
    ("numbers", "[config.heads, 'x.shape[-1]']", ("config.heads", "x.shape[-1]")),
    ("names", "[config.heads, config.text.heads]", ("config.heads", "config.text.heads")),
    ("parts", "[q, 2, k]", ("q", 2, "k")),
    ("parts", "[config.q, 2]", ("config.q", 2)),
    ("parts-by-param", "[1, 1]", (1, 1)),
    ("parts-by-param", "{up: [1, 1], down: [config.a, b]}", {"up": (1, 1), "down": ("config.a", "b")}),
    ("placement", "shard(1)", shard(1)),
    ("input", "replicate", {"": Flow(arrives=REPLICATE)}),
    ("input", "{x: shard(0) -> replicate, y: replicate}", {"x": Flow(shard(0), REPLICATE), "y": Flow(arrives=REPLICATE)}),
    ("output", "replicate", {"": Flow(wanted=REPLICATE)}),
    ("output", "{0: replicate, '1': shard(0), key: shard(1)}",
     {"0": Flow(wanted=REPLICATE), "1": Flow(wanted=shard(0)), "key": Flow(wanted=shard(1))}),
    ("params", "shard(0)", {"": {"": shard(0)}}),
    ("params", "{tp: shard(0)}", {"": {"tp": shard(0)}}),
    ("params", "{weight: shard(0), bias: {tp: replicate, tp_outer: shard(0)}}",
     {"weight": {"": shard(0)}, "bias": {"tp": REPLICATE, "tp_outer": shard(0)}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "value"), GOOD)
def test_a_value_is_of_its_kind(kind: str, text: str, value: Any) -> None:
    parsed, findings = parse(kind, text)
    assert not findings.items
    assert parsed == value and type(parsed) is type(value)


def test_a_choice_is_one_of_the_declared_values() -> None:
    assert parse("choice", "full", ("full", "none"))[0] == "full"
    [found] = parse("choice", "ful", ("full", "none"))[1].items
    assert found.code == "unknown-value" and found.help == "did you mean full? there are full, none"


WRONG_FORMS = [
    "[]",
    "{}",
    "[[a]]",
    "{a: {b: [c]}}",
    "",
    "'a b'",
    "-1",
    "1.5",
    "0x10",
    "²",
    "99999999999999999999",
    "shard(x)",
]


@pytest.mark.parametrize("text", WRONG_FORMS)
@pytest.mark.parametrize("kind", sorted(options._CONVERTERS))
def test_every_other_form_is_refused_inside_the_value(kind: str, text: str) -> None:
    allowed = {("names", "[]"), ("numbers", "[]")}
    _, findings = parse(kind, text, ("full",))
    assert bool(findings.items) is ((kind, text) not in allowed)
    for found in findings.items:
        assert found.span is not None and found.message and found.help
        assert found.span.line == 1 and found.span.column >= len("k:") + 1
        assert found.span.end_column <= len(f"k: {text}") + 2


def test_every_kind_that_is_declared_has_a_converter() -> None:
    declared = {kind.kind for style in STYLES.values() for kind in style.options.values()}
    assert declared <= set(options._CONVERTERS)


@given(st.integers(0, 10**17))
def test_whole_numbers_are_read_with_and_without_underscores(number: int) -> None:
    for text in (str(number), f"{number:_}"):
        assert options.whole_number(Scalar(text, True, node_of("x").span)) == number


@pytest.mark.parametrize(
    "text", ["", "01", "1__0", "1_00", "_1", "1_", "-0", "+1", "1.0", "٣", "²", "9" * 5000]
)
def test_other_digits_are_no_whole_number(text: str) -> None:
    assert options.whole_number(Scalar(text, True, node_of("x").span)) is None


def test_float16_is_refused_as_a_dtype_of_gradients() -> None:
    _, findings = parse("dtype", "float16")
    [found] = findings.items
    assert found.code == "gradient-underflow" and "bfloat16" in (found.help or "")
    assert found.span.line == 1
    [found] = parse("dtype", "float17")[1].items
    assert found.code == "unknown-value" and " float16" not in (found.help or "")


def test_an_unknown_axis_is_told_from_a_parameter() -> None:
    [found] = parse("params", "{weight: {pt: shard(0)}}")[1].items
    assert found.code == "unknown-axis" and all(axis in (found.help or "") for axis in AXES)
    [found] = parse("params", "{tp: shard(0), weight: shard(0)}")[1].items
    assert found.code == "unknown-axis" and "'weight' is no axis" in found.message


@pytest.mark.parametrize("key", ["on", "null", "1", "1.5", "2001-01-01"])
def test_keys_that_yaml_retypes_are_refused(key: str) -> None:
    for kind in ("params", "output"):
        findings = parse(kind, f"{{{key}: replicate}}")[1].items
        if kind == "output" and key == "1":
            assert not findings  # an index
        else:
            assert [found.code for found in findings] == ["yaml-retyped"]
            assert f'"{key}"' in (findings[0].help or "")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("shrad(1)", "did you mean shard(1)?"),
        ("Shrad( 2 )", "did you mean shard(2)?"),
        ("'shard[0]'", "did you mean shard(0)?"),
        ("shard", "did you mean shard(<dimension>)?"),
        ("replicat()", "did you mean replicate?"),
        ("foo(1)", "a placement is replicate"),
        ("shard(x)", "a placement is replicate"),
        ("'1'", "a placement is replicate"),
    ],
)
def test_a_misspelt_placement_is_told_the_nearest(text: str, meant: str) -> None:
    for kind in ("placement", "output", "params"):
        _, findings = parse(kind, text)
        assert [(f.help or "").startswith(meant) for f in findings.items] == [True]
