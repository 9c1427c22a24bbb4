"""Modules of transformers as they are, under plans that know no sizes: exact in float64, forward and backward."""

from __future__ import annotations

import pytest

from tests.parity import Case, Errors, assert_exact, compare, plan
from tests.styles import unmodified
from tests.styles.models import around

pytest.importorskip("transformers", reason="the optional extra `hf`")

HEADS = "config.num_attention_heads, config.num_key_value_heads"
PHI3 = [
    f"inner.attention.qkv_proj: {{style: colwise, packed: [{HEADS}, config.num_key_value_heads]}}",
    "inner.attention.o_proj: rowwise",
    "inner.attention: {style: shard-params, divide: [config.num_attention_heads, num_key_value_heads]}",
]
GPT2 = [
    "inner.attention.c_attn: {style: colwise, packed: [1, 1, 1]}",
    "inner.attention.c_proj: rowwise",
    "inner.attention: {style: shard-params, divide: [split_size]}",
]
QWEN3 = [
    "inner.attention.{q,k,v}_proj: colwise",
    "inner.attention.o_proj: rowwise",
    "inner.attention.{q,k}_norm: replicate",
]
T5 = [
    "inner.attention.[qkv]: colwise",
    "inner.attention.o: rowwise",
    "inner.attention.relative_attention_bias: colwise",
]
TP, TP_FSDP = {"tp": 2}, {"dp_shard": 2, "tp": 2}


def case(name: str, mesh: dict[str, int], model: str, *rules: str) -> Case:
    text = "rules:\n" + "\n".join(f"  {line}" for line in rules)
    return Case(name, plan(text), mesh, around(getattr(unmodified, model)))


OF_2 = [
    case("Phi-3's attention", TP, "phi3", *PHI3),
    case("Phi-3's MLP", TP, "phi3_mlp", "inner.gate_up_proj: {style: colwise, packed: [1, 1]}", "inner.down_proj: rowwise"),
    case("GPT-2's attention", TP, "gpt2", *GPT2),
    case("Qwen3's attention and its norms", TP, "qwen3", *QWEN3),
    case("T5's attention and its table of distances", TP, "t5", *T5),
    case("GPT-NeoX's attention", TP, "gpt_neox", "inner.attention.query_key_value: colwise", "inner.attention.dense: rowwise"),
]  # fmt: skip
SPOILT = [
    case("norms that every rank takes for its own", TP, "qwen3", *QWEN3[:2]),
    case(
        "norms that are not summed",
        TP,
        "qwen3",
        *QWEN3[:2],
        QWEN3[2].replace("replicate", "{style: replicate, grad: replicate}"),
    ),
]
OF_4 = [
    case("Qwen3's attention under fsdp", TP_FSDP, "qwen3", *QWEN3, '"": fsdp'),
    case("Phi-3's attention under fsdp", TP_FSDP, "phi3", *PHI3, '"": fsdp'),
    case("GPT-2's attention under fsdp", TP_FSDP, "gpt2", *GPT2, '"": fsdp'),
]


@pytest.fixture(scope="module")
def on_2_ranks() -> dict[str, Errors | str]:
    return compare([*OF_2, *SPOILT])


@pytest.fixture(scope="module")
def on_4_ranks() -> dict[str, Errors | str]:
    return compare(OF_4)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in OF_2])
def test_over_tp(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_2_ranks[name])


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in SPOILT])
def test_a_norm_whose_gradient_nobody_sums_is_seen(name: str, on_2_ranks: dict[str, Errors | str]) -> None:
    result = on_2_ranks[name]
    assert not isinstance(result, str), result
    assert (
        result["gradient inner.attention.q_norm.weight"]
        > 0.01
        < result["gradient inner.attention.k_norm.weight"]
    )


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in OF_4])
def test_over_tp_and_fsdp(name: str, on_4_ranks: dict[str, Errors | str]) -> None:
    assert_exact(on_4_ranks[name])
