"""Parameters placed in every way that a rule can say: gradients, values and outputs are those of the
unsharded module.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import REPLICATE, shard
from parallelizer.styles import attributes
from parallelizer.styles.packing import Packing
from tests.chosen import chosen
from tests.findings import compiled, finding, findings, marked, mesh_of
from tests.parity import Case, Errors, asked_for, assert_exact, compare, plan
from tests.styles.models import (
    AddingMlp,
    Alibi,
    BiasBehind,
    ConfiguredAttention,
    Conv1DMlp,
    Experts,
    FusedAttention,
    FusedExperts,
    FusedMlp,
    GroupedAttention,
    InterleavedMlp,
    Mlp,
    NormedMlp,
    Scaled,
    Sizes,
    TransposedMlp,
    around,
)


def rules(*lines: str) -> str:
    return "rules:\n" + "\n".join(f"  {line}" for line in lines)


TP, OUTER_TP = {"tp": 2}, {"tp_outer": 2, "tp": 2}
REPLICATED_INPUT = "{style: prepare-io, input: {x: replicate}, local_input: true, grad: partial, output: partial -> replicate}"
ON_OUTER = REPLICATED_INPUT.replace("prepare-io,", "prepare-io, axis: tp_outer,")

GROUPED = (
    "inner.q: colwise", "inner.[kv]: {style: colwise, replicate_kv: true}", "inner.out: rowwise",
    "inner.k_norm: replicate", "inner: {style: shard-params, divide_groups: [groups], replicate_kv: true}",
)  # fmt: skip
OF_2 = [
    ("colwise and rowwise with bias", Mlp, rules("inner.up: colwise", "inner.down: rowwise")),
    ("colwise and rowwise without bias", lambda: Mlp(bias=False), rules("inner.up: colwise", "inner.down: rowwise")),
    ("colwise gathered", Mlp, rules("inner.up: {style: colwise, output: replicate}")),
    ("rowwise from a whole input", Mlp, rules("inner.down: {style: rowwise, input: replicate}")),
    ("rowwise reduced over the sequence", Mlp, rules(
        "inner.up: colwise", "inner.down: {style: rowwise, output: shard(1)}",
        "inner: {style: prepare-output, output: shard(1) -> replicate}",
    )),
    ("an embedding by rows", Mlp, rules("before: rowwise")),
    ("an embedding by columns", Mlp, rules("before: {style: colwise, output: replicate}")),
    ("packed halves", FusedMlp, rules("inner.gate_up: {style: colwise, packed: [1, 1]}", "inner.down: rowwise")),
    ("packed heads, divided attributes and a norm over a slice of heads", FusedAttention, rules(
        "inner.qkv: {style: colwise, packed: [q_heads, kv_heads, kv_heads]}", "inner.out: rowwise",
        "inner.q_norm: replicate", "inner: {style: shard-params, divide: [heads, kv_heads]}",
    )),
    ("a transposed linear", TransposedMlp, rules(
        "inner.up: {style: shard-params, params: {weight: shard(1), bias: shard(-1)}, input: replicate, output: shard(-1)}",
        "inner.down: {style: shard-params, params: {weight: shard(0), bias: replicate}, input: shard(2), output: replicate}",
    )),
    ("a transposed linear without layouts", TransposedMlp, rules(
        "inner.up: {style: shard-params, params: {weight: shard(1), bias: shard(0)}}",
        "inner.down: {style: shard-params, params: {weight: shard(0), bias: replicate}, input: shard(2), output: replicate}",
        "inner: {style: prepare-input, input: replicate, local: true, grad: partial}",
    )),
    ("a parameter by its name", TransposedMlp, rules(
        "inner.up.weight: {style: shard-params, params: shard(1), input: replicate}",
        "inner.up.bias: {style: shard-params, params: {tp: shard(0)}, output: shard(-1)}",
        "inner.down: {style: shard-params, params: {weight: shard(0), bias: replicate}, input: shard(2), output: replicate}",
    )),
    ("a linear that is stored the other way round", Conv1DMlp, rules("inner.up: colwise", "inner.down: rowwise")),
    ("such a linear gathered", Conv1DMlp, rules("inner.up: {style: colwise, output: replicate}")),
    ("such a linear from a whole input", Conv1DMlp, rules("inner.down: {style: rowwise, input: replicate}")),
    ("such a linear on the sequence", Conv1DMlp, rules(
        "before: {style: rowwise, output: shard(1)}", "inner.up: {style: colwise, input: shard(1)}",
        "inner.down: {style: rowwise, output: shard(1)}", "after: {style: colwise, input: shard(1), output: replicate}",
    )),
    ("parts that the configuration of a module around knows", ConfiguredAttention, rules(
        "inner.qkv: {style: colwise, packed: [config.heads, config.kv_heads, config.kv_heads]}", "inner.out: rowwise",
        "inner: {style: shard-params, divide: [config.heads, config.kv_heads]}",
    )),
    ("parts of one parameter of several", FusedExperts, rules(
        "inner: [{style: shard-params, params: {gate_up: shard(1), down: shard(2)}, packed: {gate_up: [1, 1]}}, "
        f"{REPLICATED_INPUT}]",
    )),
    ("one key-value head for two ranks", lambda: GroupedAttention(4, 1), rules(*GROUPED)),
    ("as many key-value heads as ranks", lambda: GroupedAttention(4, 2), rules(*GROUPED)),
    ("one key-value head from the sequence", lambda: GroupedAttention(4, 1), rules(
        "before: {style: rowwise, output: shard(1)}", "inner: [{style: prepare-input, input: shard(1) -> replicate},"
        " {style: shard-params, divide_groups: [groups], replicate_kv: num_kv_heads}]", *GROUPED[:2],
        "inner.out: {style: rowwise, output: shard(1)}", "inner.k_norm: replicate",
        "after: {style: colwise, input: shard(1), output: replicate}",
    )),
    ("slices of a buffer, and of a parameter, of each head", Alibi, rules(
        "inner.qkv.*: colwise", "inner.out: rowwise",
        "inner: {style: shard-params, params: {slopes: shard(0), weigh: shard(0)}}",
    )),
    ("a buffer by its name", Alibi, rules(
        "inner.qkv.*: colwise", "inner.out: rowwise", "inner.slopes: {style: shard-params, params: shard(0)}",
        "inner.weigh: {style: shard-params, params: {tp: shard(-1)}}",
    )),
    ("slices of a buffer on DTensors", Scaled, rules(
        "inner: {style: shard-params, params: {scale: shard(1)}, input: replicate -> shard(2), output: replicate}",
    )),
    ("parts that take turns need no packing", InterleavedMlp, rules("inner.gate_up: colwise", "inner.down: rowwise")),
    ("any dimension", lambda: Experts(), rules(
        "inner: {style: shard-params, params: {up: shard(2), down: shard(1)}, input: replicate, output: replicate}",
    )),
    ("experts on local shards", Experts, rules(
        f"inner: [{{style: shard-params, params: {{up: shard(0), down: shard(0)}}}}, {REPLICATED_INPUT}]",
    )),
    ("a bias added to each rank's term of a sum", BiasBehind, rules(
        f"inner: [{{style: shard-params, params: {{up: shard(1), down: shard(0)}}}}, {REPLICATED_INPUT}]",
        "inner.bias: {style: replicate, value: partial}",
    )),
    ("an output that is changed in place", AddingMlp, rules(
        "inner.up: colwise", "inner.down: {style: rowwise, own: true}",
    )),
    ("the sequence", NormedMlp, rules(
        "before: {style: rowwise, output: shard(1)}", "inner.norm: sequence",
        "inner.mlp: {style: prepare-input, input: shard(1) -> replicate}", "inner.mlp.up: colwise",
        "inner.mlp.down: {style: rowwise, output: shard(1)}", "after: {style: colwise, input: shard(1), output: replicate}",
    )),
    ("the sequence laid out whole", NormedMlp, rules(
        "inner.norm: {style: sequence, layout: replicate}", "inner.mlp.up: colwise", "inner.mlp.down: rowwise",
    )),
    ("replicated parameters that every rank uses alike", NormedMlp, rules(
        "inner.norm: {style: replicate, grad: replicate}", "inner.mlp.up: colwise", "inner.mlp.down: rowwise",
    )),
]  # fmt: skip

OF_4 = [
    ("two axes", OUTER_TP, Experts, rules(
        "inner: {style: shard-params, params: {up: {tp_outer: shard(0), tp: shard(2)}, down: {tp_outer: shard(0), tp: shard(1)}},"
        " input: replicate, output: replicate}",
    )),
    ("two axes on one dimension", OUTER_TP, TransposedMlp, rules(
        "inner.up: {style: shard-params, params: {weight: {tp_outer: shard(1), tp: shard(1)}, bias: {tp: shard(0), "
        "tp_outer: shard(0)}},"
        " input: replicate, output: replicate}",
        "inner.down: {style: shard-params, params: {weight: {tp_outer: shard(0), tp: shard(0)}}, input: replicate, "
        "output: replicate}",
    )),
    ("two axes on one dimension of local shards", OUTER_TP, Experts, rules(
        "inner: [{style: shard-params, params: {up: {tp_outer: shard(2), tp: shard(2)}, down: {tp: shard(1), "
        "tp_outer: shard(1)}}},"
        f" {REPLICATED_INPUT}, {ON_OUTER}]",
    )),
    ("two axes on local shards", OUTER_TP, Experts, rules(
        "inner: [{style: shard-params, params: {up: {tp_outer: shard(0), tp: shard(2)}, down: {tp_outer: shard(0), "
        "tp: shard(1)}}},"
        f" {REPLICATED_INPUT}, {ON_OUTER}]",
    )),
    ("two axes on one packed dimension", OUTER_TP, lambda: Experts(hidden=8, fused=True), rules(
        f"inner: [{REPLICATED_INPUT}, {ON_OUTER}]",
        "inner.up: {style: shard-params, params: {tp: shard(2), tp_outer: shard(2)}, packed: [1, 1]}",
        "inner.down: {style: shard-params, params: {tp: shard(1), tp_outer: shard(1)}}",
    )),
    ("packed on one axis, sharded on another", OUTER_TP, lambda: Experts(fused=True), rules(
        f"inner: [{REPLICATED_INPUT}, {ON_OUTER}]",
        "inner.up: {style: shard-params, params: {tp: shard(2), tp_outer: shard(0)}, packed: [1, 1]}",
        "inner.down: {style: shard-params, params: {tp: shard(1), tp_outer: shard(0)}}",
    )),
    ("tp_outer beside tp elsewhere", OUTER_TP, lambda: nn.Sequential(Experts(), Mlp()), rules(
        f"inner.0: [{{style: shard-params, params: {{up: {{tp_outer: shard(0)}}, down: {{tp_outer: shard(0)}}}}}}, {ON_OUTER}]",
        "inner.1.up: colwise", "inner.1.down: rowwise",
    )),
    ("fsdp around packed heads", {"dp_shard": 2, "tp": 2}, FusedAttention, rules(
        "inner.qkv: {style: colwise, packed: [q_heads, kv_heads, kv_heads]}", "inner.out: rowwise",
        "inner.q_norm: replicate", "inner: {style: shard-params, divide: [heads, kv_heads]}", '"": fsdp',
    )),
    ("fsdp around parts that the configuration knows", {"dp_shard": 2, "tp": 2}, ConfiguredAttention, rules(
        "inner.qkv: {style: colwise, packed: [config.heads, config.kv_heads, config.kv_heads]}", "inner.out: rowwise",
        "inner: {style: shard-params, divide: [config.heads, config.kv_heads]}", '"": fsdp',
    )),
    ("two key-value heads for four ranks", {"tp": 4}, GroupedAttention, rules(*GROUPED)),
    ("one key-value head for four ranks", {"tp": 4}, lambda: GroupedAttention(8, 1), rules(*GROUPED)),
    ("two key-value heads of linears stored the other way round", {"tp": 4}, lambda: GroupedAttention(transposed=True),
     rules(*GROUPED)),
    ("fsdp around a key-value head for two ranks", {"dp_shard": 2, "tp": 2}, lambda: GroupedAttention(4, 1),
     rules(*GROUPED, '"": fsdp')),
    ("fsdp around slices of a buffer", {"dp_shard": 2, "tp": 2}, Alibi, rules(
        "inner.qkv.*: colwise", "inner.out: rowwise",
        "inner: {style: shard-params, params: {slopes: shard(0), weigh: shard(0)}}", '"": fsdp',
    )),
    ("slices of a buffer over two axes", OUTER_TP, Scaled, rules(
        "inner: {style: shard-params, params: {scale: {tp_outer: shard(1), tp: shard(1)}}, input: replicate, output: replicate}",
    )),
    ("fsdp around parts of one parameter", {"dp_shard": 2, "tp": 2}, FusedExperts, rules(
        "inner: [{style: shard-params, params: {gate_up: shard(1), down: shard(2)}, packed: {gate_up: [1, 1]}}, "
        f"{REPLICATED_INPUT}]", '"": fsdp',
    )),
    ("fsdp around two axes", {"dp_shard": 2, "tp_outer": 2}, Experts, rules(
        f"inner: [{{style: shard-params, params: {{up: {{tp_outer: shard(0)}}, down: {{tp_outer: shard(0)}}}}}}, "
        f"{ON_OUTER}]", '"": fsdp',
    )),
    ("whole parameters on local shards", {"dp_shard": 2, "tp": 2}, TransposedMlp, rules(
        "inner.up: {style: shard-params, params: {weight: shard(1), bias: shard(0)}}",
        "inner.down: {style: shard-params, params: {weight: shard(0), bias: replicate}, input: shard(2), output: replicate}",
        "inner: {style: prepare-input, input: replicate, local: true, grad: partial}", '"": {style: fsdp, min_size: 1000}',
    )),
]  # fmt: skip


BY_NAME = {name: (inner, text) for name, inner, text in OF_2}


def spoilt(name: str, right: str, wrong: str) -> Case:
    inner, text = BY_NAME[name]
    assert right in text
    return Case(f"{name}: {wrong}", plan(text.replace(right, wrong)), TP, around(inner))


SPOILT = [
    spoilt("replicated parameters that every rank uses alike", "grad: replicate", "grad: partial"),
    spoilt(
        "packed heads, divided attributes and a norm over a slice of heads",
        "q_norm: replicate", "q_norm: {style: replicate, grad: replicate}",
    ),
    spoilt("parts of one parameter of several", ", packed: {gate_up: [1, 1]}", ""),
    spoilt("parts that the configuration of a module around knows", "packed: [config.heads, config.kv_heads, config.kv_heads]",
           "packed: [1, 1]"),
    spoilt("experts on local shards", "grad: partial", "grad: replicate"),
]  # fmt: skip

CASES_OF_2 = [Case(name, plan(text), TP, around(inner)) for name, inner, text in OF_2]
CASES_OF_4 = [Case(name, plan(text), mesh, around(inner)) for name, mesh, inner, text in OF_4]


@pytest.fixture(scope="module")
def on_2_ranks() -> dict[str, Errors | str]:
    return compare([*CASES_OF_2, *SPOILT])


@pytest.fixture(scope="module")
def on_4_ranks(request: pytest.FixtureRequest) -> dict[str, Errors | str]:
    return compare(asked_for(CASES_OF_4, request))


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in CASES_OF_2])
def test_one_axis(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_2_ranks[name])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", chosen([case.name for case in CASES_OF_4], ("fsdp around packed heads", "fsdp around two axes"))
)
def test_two_axes(name: str, on_4_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_4_ranks[name])


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in SPOILT])
def test_the_wrong_kind_of_gradient_is_seen(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    result = on_2_ranks[name]
    assert not isinstance(result, str), result
    assert max(error for what, error in result.items() if what.startswith("gradient")) > 0.01


# What a style refuses


@pytest.mark.parametrize(
    ("rule", "inner", "code", "mark"),
    [
        ("inner.up: {style: shard-params, params: {wight: shard(0)}}", Mlp, "unknown-parameter", "wight"),
        ("inner.up: {style: shard-params, params: {weight: shard(2)}}", Mlp, "unknown-dim", "shard(2)"),
        ("inner.up: {style: shard-params, params: {weight: shard(-3)}}", Mlp, "unknown-dim", "shard(-3)"),
        ("inner.up: {style: shard-params, params: {weight: partial}}", Mlp, "unknown-placement", "partial"),
        ("inner.up: {style: shard-params, params: {weight: {cp: shard(0)}}}", Mlp, "unknown-axis", "cp"),
        ("inner.up: {style: shard-params, params: {weight: {dp_shard: shard(0)}}}", Mlp, "unknown-axis", "dp_shard"),
        ("inner.up: {style: shard-params, params: shard(0)}", Mlp, "wrong-type", "params"),
        ("inner.up.weight: {style: shard-params, params: {weight: shard(0)}}", Mlp, "wrong-type", "params"),
        ("inner.up.weight: {style: shard-params, params: shard(0), divide: [in_features]}", Mlp, "wrong-type", "divide"),
        ("inner.up: {style: shard-params, params: {weight: shard(0)}, input: {y: replicate}}", Mlp, "unknown-input", "y"),
        ("inner.up: {style: shard-params, params: {weight: shard(0)}, divide: [name]}", Mlp, "unknown-attribute", "divide"),
        ("inner.up: {style: shard-params, params: {weight: shard(0)}, divide: [in_features]}", Mlp, None, None),
        ("inner.up: {style: shard-params, divide: [training]}", Mlp, "unknown-attribute", "divide"),
        ("inner.up: {style: colwise, packed: [parts, parts]}", Mlp, "unknown-attribute", "packed"),
        ("inner.up: {style: colwise, packed: [1, 4]}", Mlp, "not-divisible", "packed"),
        ("inner.up: {style: colwise, packed: [1, 3]}", Mlp, "not-divisible", "packed"),
        ("inner.qkv: {style: colwise, packed: [q_heads, kv_heads, kv_heads]}", lambda: FusedAttention(4, 1), "not-divisible",
         "packed"),
        ("inner.up: {style: colwise, packed: [1, nobody.knows]}", Mlp, "unknown-attribute", "packed"),
        ("inner.up: {style: colwise, packed: {weight: [1, 1]}}", Mlp, "wrong-type", "{weight: [1, 1]}"),
        ("inner: {style: shard-params, params: {down: shard(2)}, packed: {gate_up: [1, 1]}}", FusedExperts, "unknown-parameter",
         "gate_up"),
        ("inner: {style: shard-params, params: {gate_up: replicate}, packed: {gate_up: [1, 1]}}", FusedExperts,
         "unknown-parameter", "gate_up"),
        ("inner: {style: shard-params, divide: [config.heads, config.nobody]}", ConfiguredAttention, "unknown-attribute",
         "divide"),
        ("inner.k: {style: colwise, replicate_kv: no.body}", GroupedAttention, "unknown-attribute", "replicate_kv"),
        ("inner.up: {style: colwise, replicate_kv: true}", Mlp, "unknown-attribute", "replicate_kv"),
        ("inner.k: {style: colwise, replicate_kv: true}", lambda: GroupedAttention(9, 3), "heads-not-divisible", "replicate_kv"),
        ("inner.k: {style: colwise, replicate_kv: true, output: replicate}", lambda: GroupedAttention(4, 1), "wrong-layout",
         "output"),
        ("inner.k: {style: colwise, replicate_kv: true, local: false}", lambda: GroupedAttention(4, 1), "wrong-layout",
         "local"),
        ("inner.k: {style: colwise, replicate_kv: true, packed: [1, 1]}", lambda: GroupedAttention(4, 1), "wrong-layout",
         "packed"),
        ("inner: {style: shard-params, divide_groups: [groups]}", GroupedAttention, "missing-option", "divide_groups"),
        ("inner: {style: shard-params, divide_groups: [group], replicate_kv: true}", lambda: GroupedAttention(4, 1),
         "unknown-attribute", "divide_groups"),
        ("inner: {style: shard-params, params: {slope: shard(0)}}", Alibi, "unknown-parameter", "slope"),
        ("inner: {style: shard-params, params: {slopes: shard(1)}}", Alibi, "unknown-dim", "shard(1)"),
        ("inner: {style: shard-params, params: {slopes: {cp: shard(0)}}}", Alibi, "unknown-axis", "cp"),
        ("inner: {style: shard-params, params: {slopes: shard(0)}}", lambda: Alibi(3), "not-divisible", "shard-params"),
        ("inner.slopes: replicate", Alibi, "style-on-parameter", "replicate"),
        ("inner.slopes: colwise", Alibi, "style-on-parameter", "colwise"),
        ("inner: {style: shard-params, params: {slopes: shard(0)}, packed: {slopes: [1, 1]}}", Alibi, "unknown-parameter",
         "slopes"),
        ("inner: {style: shard-params, divide: [qkv.out_features]}", ConfiguredAttention, "unknown-attribute", "divide"),
        ("inner.up: {style: colwise, packed: [1, 1], output: replicate}", Mlp, "wrong-layout", "replicate"),
        ("inner.up: {style: colwise, packed: [1, 1], output: shard(0)}", Mlp, "wrong-layout", "shard(0)"),
        ("inner.down: {style: rowwise, packed: [1, 1], input: replicate}", Mlp, "wrong-layout", "replicate"),
        ("inner.q_norm: colwise", FusedAttention, "style-module", "colwise"),
        ("inner: rowwise", FusedMlp, "style-module", "rowwise"),
        ("inner: sequence", Mlp, "style-module", "sequence"),
        ("inner: replicate", Mlp, "style-module", "replicate"),
        ("inner.norm: {style: sequence, layout: partial}", NormedMlp, "unknown-placement", "partial"),
        ("inner.up: {style: colwise, input: {input: shard(0) -> shard(1)}}", Mlp, "wrong-layout", "shard(1)"),
        ("inner.up: {style: colwise, input: {input: shard(1), weight: replicate}}", Mlp, "unknown-input", "weight"),
        ("inner.up: {style: colwise, output: {1: replicate}}", Mlp, "unknown-input", "1"),
        ("inner.up: {style: colwise, output: partial}", Mlp, "unknown-placement", "partial"),
        ("inner.up: {style: colwise, axis: cp}", Mlp, "unknown-axis", "axis"),
        ("inner.norm: {style: sequence, axis: dp_shard}", NormedMlp, "unknown-axis", "axis"),
    ],
)  # fmt: skip
def test_what_a_module_cannot_have_is_refused_where_it_is_written(
    rule: str, inner: Any, code: str | None, mark: str | None
) -> None:
    text = rules(rule, "after: colwise")
    if code is None:
        assert findings(text, around(inner), mesh_of(tp=2)) == ()
        return
    found = finding(text, around(inner), mesh_of(tp=2))
    assert found.code == code
    assert marked(text, found) == mark


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("inner.up: colwise", "dimension 0 of inner.up.weight is 12, which tp=5 does not divide"),
        ("inner.down: rowwise", "dimension 1 of inner.down.weight is 12, which tp=5 does not divide"),
        ("inner: {style: shard-params, divide: [heads]}", "inner.heads is 4, which tp=5 does not divide"),
        (
            "inner: {style: shard-params, divide: [config.heads]}",
            "inner.config.heads is 4, which tp=5 does not divide",
        ),
    ],
)
def test_sizes_that_do_not_divide_tell_which_do(rule: str, message: str) -> None:
    text = rules(rule)
    inner = ConfiguredAttention if "config" in rule else FusedAttention if "divide" in rule else Mlp
    found = finding(text, around(inner), mesh_of(tp=5))
    assert (found.code, found.message) == ("not-divisible", message)
    assert found.help is not None and found.help.startswith("tp can be 1, 2, ")
    assert [(r.span, r.label) for r in found.related] == [(Span("mesh", 1, 5, 6), "tp=5 is set here")]


@pytest.mark.parametrize("more", ["", "fsdp"])
def test_packed_heads_that_do_not_divide_tell_what_divides_them_all(more: str) -> None:
    parts = "config.heads, config.kv_heads, config.kv_heads"
    text = rules(f"inner.qkv: {{style: colwise, packed: [{parts}]}}", *(['"": fsdp'] if more else []))
    found = finding(text, around(ConfiguredAttention, Sizes(12, 6)), mesh_of(tp=4, dp_shard=2 if more else 1))
    assert found.message == "the part config.kv_heads of inner.qkv.weight is 6, which tp=4 does not divide"
    assert found.help == "tp can be 1, 2, 3, 6 (the common divisors of the sizes that it splits: 6, 12)"
    assert marked(text, found) == "packed"


def test_one_dimension_over_two_axes_must_divide_by_their_product() -> None:
    text = rules("inner: {style: shard-params, params: {up: {tp_outer: shard(0), tp: shard(0)}}}")
    found = finding(text, around(lambda: Experts(6)), mesh_of(tp_outer=2, tp=2))
    assert found.message == "dimension 0 of inner.up is 6, which tp_outer x tp=4 does not divide"


# What is decided while compiling


def test_a_style_that_mentions_one_axis_stands_on_no_other() -> None:
    text = rules("inner: {style: shard-params, params: {up: {tp_outer: shard(0)}}}", "after: colwise")
    experts, _ = compiled(text, around(Experts), mesh_of(tp_outer=2, tp=2)).of_slot("params")
    assert experts.axes == ("tp_outer",)
    assert experts.params == {"up": {"tp_outer": shard(0)}}


def test_an_axis_of_size_1_is_left_out() -> None:
    text = rules("inner: {style: shard-params, params: {up: {tp_outer: shard(0), tp: shard(2)}}}")
    (both,) = compiled(text, around(Experts), mesh_of(tp=2))
    assert both.axes == ("tp",)
    assert both.params == {"up": {"tp": shard(2)}}
    assert len(compiled(text, around(Experts))) == 0


def test_packing_counts_every_axis_that_shares_the_dimension() -> None:
    text = rules(
        "inner.up: {style: shard-params, params: {tp_outer: shard(2), tp: shard(2)}, packed: [1, 1]}"
    )
    (one,) = compiled(text, around(Experts, hidden=8, fused=True), mesh_of(tp_outer=2, tp=2))
    assert one.packed == {"up": Packing(2, (8, 8), 4)}
    (one,) = compiled(
        text.replace("tp_outer: shard(2)", "tp_outer: shard(0)"),
        around(Experts, hidden=8, fused=True),
        mesh_of(tp_outer=2, tp=2),
    )
    assert one.packed == {"up": Packing(2, (8, 8), 2)}


def test_attributes_are_remembered_whole() -> None:
    text = rules("inner: {style: shard-params, divide: [heads, kv_heads]}")
    (one,) = compiled(text, around(FusedAttention), mesh_of(tp=2))
    assert one.divided == {"heads": 4, "kv_heads": 2}


def test_numbers_of_a_configuration_are_divided_in_a_copy_that_the_module_alone_has() -> None:
    shared = Sizes()
    modules = [ConfiguredAttention(shared) for _ in range(2)]
    attributes.write(modules[0], "config.heads", 2)
    attributes.write(modules[0], "config.kv_heads", 1)
    assert (shared.heads, shared.kv_heads) == (4, 2) and modules[1].config is shared
    assert modules[0].config == Sizes(2, 1)
    text = rules("inner: {style: shard-params, divide: [config.heads, config.kv_heads]}")
    (one,) = compiled(text, around(ConfiguredAttention), mesh_of(tp=2))
    assert one.divided == {"config.heads": 4, "config.kv_heads": 2}


def test_replicated_heads_are_replicated_parameters_and_the_legal_degrees_are_told() -> None:
    text = rules(*GROUPED)
    by_module = {a.module: a for a in compiled(text, around(GroupedAttention), mesh_of(tp=4))}
    assert by_module["inner.k"].params == {n: {"tp": REPLICATE} for n in ("weight", "bias")}
    assert by_module["inner"].divided == {"groups": 4}
    enough = {a.module: a for a in compiled(text, around(GroupedAttention), mesh_of(tp=2))}
    assert enough["inner.k"].params["weight"] == {"tp": shard(0)} and "inner" not in enough
    found = finding(rules(GROUPED[1]), around(GroupedAttention, 9, 3), mesh_of(tp=2))
    assert (
        found.message
        == "inner.k has 3 key-value heads, which cannot be distributed over tp=2 (1 more like it)"
    )
    assert found.help == "tp can be 1, 3, or a multiple of 3, where heads are replicated"


def test_a_buffer_stays_whole_and_is_no_parameter() -> None:
    text = rules("inner: {style: shard-params, params: {slopes: shard(0), weigh: shard(0)}}")
    (one,) = compiled(text, around(Alibi), mesh_of(tp=2))
    assert (one.params, one.buffers) == ({"weigh": {"tp": shard(0)}}, {"slopes": {"tp": shard(0)}})
    (one,) = compiled(
        rules("inner.slopes: {style: shard-params, params: shard(0)}"), around(Alibi), mesh_of(tp=2)
    )
    assert (one.params, one.buffers) == ({}, {"slopes": {"tp": shard(0)}})
    assert len(compiled(text, around(Alibi))) == 0


@pytest.mark.parametrize("options", ["", ", output: replicate", ", input: shard(1)", ", local: false"])
def test_plain_linears_get_torchs_own_style(options: str) -> None:
    (one,) = compiled(rules(f"inner.up: {{style: colwise{options}}}"), around(Mlp), mesh_of(tp=2))
    assert isinstance(one.act, ColwiseParallel)
