"""What of a step is in float8, against closed forms."""

from __future__ import annotations

import functools
import io

import pytest

from parallelizer.configuration.without_float8 import without_float8
from parallelizer.diagnostics.units import size
from parallelizer.report.rows.precision import Precision, precision
from parallelizer.report.text.precision import write
from tests.chosen import chosen
from tests.simulate.setups import (
    CAST,
    EXPERTS_IN_FLOAT8,
    GATHERED,
    MIXTURES,
    in_float8,
    llama,
    setup_of,
    traced,
)

pytest.importorskip("torchao", reason="float8 needs torchao")

LINEARS = 7
CASTS = {"tensorwise": 6, "rowwise": 6, "rowwise-gw-hp": 4}
"""Of the factors of a linear's three products, each cast for itself; the last recipe casts none for the weight's gradient."""


@functools.cache
def found(*overrides: str) -> Precision:
    setup = llama("model.n_layers=1", *overrides)
    model = setup.build_model()
    made = precision(setup.compile(model), model, traced(setup))
    assert made is not None
    return made


@pytest.mark.parametrize("recipe", chosen(CASTS, ["rowwise-gw-hp"]))
def test_linears_casts_and_products_are_counted(recipe: str) -> None:
    made = found("device=cuda", in_float8(recipe))
    assert (made.number, made.full) == (LINEARS, ("output",))
    assert made.linears == {recipe: ("layers.0.attention.{wq,wk,wv,wo}", "layers.0.feed_forward.w{1..3}")}
    assert made.casts == CASTS[recipe] * LINEARS
    assert made.products == CASTS[recipe] // 2 * LINEARS
    assert (made.gathers, made.reductions) == (0, 0)


def test_gathered_weights_are_cast_once_for_each_gather() -> None:
    """A unit is gathered in forward and in backward, by 3 ranks, so that its rows are filled up."""
    made = found("parallel.mesh.dp_shard=3", "train.batch_size=6", in_float8("tensorwise", GATHERED))
    assert made.casts == (CASTS["tensorwise"] - 2 + 2) * LINEARS

    def filled(rows: int) -> int:
        return -(-rows // 3) * 3

    layer = (filled(64) * 2 + filled(32) * 2) * 64 + filled(128) * 64 * 2 + filled(64) * 128
    assert made.gathered == 2 * layer < made.gathers
    assert (made.reductions, made.reduced_bytes) == (2, 2 * 2 * (2 * LINEARS * 4 // 3))


@pytest.mark.slow
def test_under_tp_the_largest_values_of_sharded_tensors_are_agreed_on() -> None:
    one, two = (found("parallel=tp2", in_float8(recipe)) for recipe in ("tensorwise", "rowwise"))
    assert one.reductions > two.reductions > 0
    # One number each, in float64, but for rows of a tensor whose features are sharded.
    assert one.reduced_bytes == 8 * one.reductions < two.reduced_bytes


def test_inputs_that_are_cast_are_gathered_as_bytes_and_cast_once() -> None:
    """Two of the linears' inputs, attention's and the MLP's, of 8 rows of 32 tokens; the head gathers its own in float32."""
    plain, cast = (found("parallel=tp2", in_float8("tensorwise", *more)) for more in ((), (CAST,)))
    whole = 8 * 32 * 64
    assert (plain.inputs_gathered, cast.inputs_gathered) == (0, 2 * whole)
    assert plain.inputs_gathers - cast.inputs_gathers == 2 * whole * (4 - 1)
    # Of five linears the inputs, each in forward and for the weight's gradient, are cast in two places.
    assert plain.casts is not None and cast.casts == plain.casts - 2 * 5 + 2
    assert cast.kept < plain.kept


@pytest.mark.parametrize("recipe", chosen(["rowwise", "rowwise-gw-hp"], ["rowwise-gw-hp"]))
def test_products_and_casts_of_stacked_experts_are_counted(recipe: str) -> None:
    pytest.importorskip("transformers", reason="the optional extra `hf`")
    model = "hf_qwen3_moe"
    rule = EXPERTS_IN_FLOAT8.format(recipe)
    setup = setup_of(f"model={model}", *MIXTURES[model], "train.seq_len=16", "device=cuda", rule)
    built = setup.build_model()
    made = precision(setup.compile(built), built, traced(setup))
    assert made is not None
    layers, products = 2, 2  # the way up, of gate and up at once, and the way down
    assert (made.number, made.experts) == (layers, layers)
    assert made.casts == CASTS[recipe] * products * layers
    assert made.products == CASTS[recipe] // 2 * products * layers
    stream = io.StringIO()
    write(made, stream)
    assert stream.getvalue().splitlines()[0] == "precision  the experts of 2 modules in float8"


@pytest.mark.parametrize("accumulate", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_stage_s_casts_and_products_are_those_of_all_its_microbatches(accumulate: int) -> None:
    """Each of two ranks has one layer, and computes it for five microbatches of each part: three of them are traced."""
    setup = llama(
        "parallel=pp2", "device=cuda", "model.n_layers=2", "++parallel.pipeline.microbatches=5",
        f"train.batch_size={5 * accumulate}", f"train.accumulate={accumulate}", in_float8("rowwise-gw-hp"),
    )  # fmt: skip
    model = setup.build_model()
    for rank in (0, 1):
        made = precision(setup.compile(model), model, traced(setup, rank))
        assert made is not None and made.number == 2 * LINEARS
        assert made.casts == CASTS["rowwise-gw-hp"] * LINEARS * 5 * accumulate
        assert made.products == CASTS["rowwise-gw-hp"] // 2 * LINEARS * 5 * accumulate


def test_activations_are_shown_beside_those_without_float8() -> None:
    """A gathered input in float8 is kept, instead of one in the model's own dtype."""
    setup = llama("parallel=tp2", "model.n_layers=1", in_float8("tensorwise", CAST))
    model = setup.build_model()
    plain = traced(without_float8(setup))
    made = precision(setup.compile(model), model, traced(setup), plain)
    assert made is not None and made.kept_without is not None
    assert made.kept_without == max(point.by_category["activations"] for point in plain.memory.course)
    stream = io.StringIO()
    write(made, stream, width=100)
    text = f"  activations {size(made.kept)} at most, {size(made.kept_without)} without float8"
    assert text in stream.getvalue().splitlines()


def test_a_plan_without_float8_says_nothing() -> None:
    setup = llama("model.n_layers=1")
    model = setup.build_model()
    assert precision(setup.compile(model), model, None) is None
    stream = io.StringIO()
    write(None, stream)
    assert stream.getvalue() == ""


def test_the_text_names_what_is_in_float8_and_what_is_not() -> None:
    stream = io.StringIO()
    write(found("parallel=fsdp2", in_float8("tensorwise", GATHERED)), stream, width=100)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "precision  7 linears in float8"
    assert lines[1].split() == [
        "tensorwise", "layers.0.attention.{wq,wk,wv,wo},", "layers.0.feed_forward.w{1..3}",
    ]  # fmt: skip
    assert "  not         output, and all that is no linear" in lines
    assert any(line.startswith("  a step      products emulated, in float32, 42 casts") for line in lines)
    assert any(line.startswith("  fsdp        gathers ") for line in lines)


def test_without_float8_the_same_plan_computes_and_gathers_in_its_own_dtype() -> None:
    setup = llama("parallel=fsdp2", "model.n_layers=1", in_float8("tensorwise", GATHERED))
    plain = without_float8(setup)
    program = plain.compile(plain.build_model())
    assert not program.of_slot("precision")
    assert [a.module for a in program.of_slot("fsdp")] == [
        a.module for a in setup.compile(setup.build_model()).of_slot("fsdp")
    ]
    assert {e.dtype for e in traced(plain).ledger if e.kind == "all_gather"} == {"float32"}
