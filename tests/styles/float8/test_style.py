"""What `float8` refuses of a module, and how it is exported."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from parallelizer.compiler.observe.module_calls import observe
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.report.export.export import export
from parallelizer.styles.float8.linear import computes_in_float8
from parallelizer.styles.float8.style import prepare
from tests.findings import compiled, finding, marked, mesh_of
from tests.report.export.test_export import both
from tests.simulate.setups import CAST, EXPERTS_IN_FLOAT8, GATHERED, MIXTURES, in_float8, llama, setup_of
from tests.styles.experts.models import Stacked
from tests.styles.models import around

pytest.importorskip("torchao", reason="float8 needs torchao")


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def tripled() -> nn.Linear:
    """A linear whose forward is replaced on the module, not by its class."""
    linear = nn.Linear(16, 16)
    linear.forward = lambda x: 3 * nn.functional.linear(x, linear.weight)
    return linear


def with_router() -> nn.Module:
    experts = Stacked()
    experts.router = nn.Linear(16, 4)
    return experts


def refused(text: str, inner: Callable[[], nn.Module]) -> tuple[str, str, str | None]:
    found = finding(text, around(inner), mesh_of(tp=2))
    assert marked(text, found) == "float8"
    return found.code, found.message, found.help


@pytest.mark.parametrize(
    ("inner", "what", "advice"),
    [
        (lambda: nn.LayerNorm(8), "LayerNorm", "leave it out of the glob"),
        (lambda: OwnForward(16, 16), "OwnForward, with a forward of its own", "leave it out of the glob"),
        (tripled, "Linear, with a forward of its own", "leave it out of the glob"),
        (
            lambda: weight_norm(nn.Linear(16, 16)),
            "ParametrizedLinear, whose weight is computed from other parameters",
            "leave it out of the glob",
        ),
        (
            lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
            "Sequential",
            "name the linears in it: inner.0",
        ),
        (
            lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))),
            "Sequential",
            "name the linears in it: inner.0, inner.1, inner.2, inner.3, ...",
        ),
        (
            with_router,
            "Stacked, which holds other linears too: inner.router",
            "for its experts, move up, down to a module without other linears, and name that module",
        ),
    ],
)
def test_what_is_no_linear_is_refused_with_the_linears_in_it(
    inner: Callable[[], nn.Module], what: str, advice: str
) -> None:
    code, message, help_text = refused("rules: {inner: float8}", inner)
    assert (code, help_text) == ("precision-module", advice)
    assert (
        message == f"float8 is for nn.Linear and for modules of stacked experts; inner is of the class {what}"
    )


def test_a_projection_that_an_attention_only_reads_is_refused() -> None:
    text = "rules: {inner.out_proj: float8}"
    code, message, _ = refused(text, lambda: nn.MultiheadAttention(16, 2))
    assert code == "precision-module" and message.endswith(
        "whose weight an attention reads without calling it"
    )


def test_stacked_experts_have_scales_of_rows() -> None:
    code, message, advice = refused("rules: {inner: float8}", lambda: Stacked())
    assert code == "precision-experts"
    assert message.startswith("the experts of inner cannot be in float8 by the recipe tensorwise: kernels")
    assert advice == "write `recipe: rowwise`, or rowwise-gw-hp"
    text = "rules: {inner: {style: float8, recipe: tensorwise}}"
    assert marked(text, finding(text, around(Stacked), mesh_of(tp=2))) == "recipe"
    text = "rules: {inner: {style: float8, recipe: rowwise, emulate: true}}"
    (application,) = compiled(text, around(Stacked), mesh_of(tp=2)).of_slot("precision")
    assert application.stacked == ("up", "down")  # the bias is no weight


def test_a_convolution_holds_no_experts() -> None:
    code, message, _ = refused("rules: {inner: float8}", lambda: nn.Conv1d(4, 4, 3))
    assert (code, message) == (
        "precision-module",
        "float8 is for nn.Linear and for modules of stacked experts; inner is of the class Conv1d",
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recipes_without_support_are_refused_with_what_they_need(recipe: str) -> None:
    text = f"rules: {{inner: {{style: float8, recipe: {recipe}}}}}"
    found = finding(text, around(nn.Linear, 16, 16))
    assert (found.code, marked(text, found)) == ("precision-recipe", "recipe")
    assert "compute capability 10.0" in found.message


def test_it_is_applied_before_styles_of_parameters_and_has_no_axis() -> None:
    text = "rules: {inner: [colwise, {style: float8, recipe: rowwise}]}"
    program = compiled(text, around(nn.Linear, 32, 32), mesh_of(tp=2))
    assert [(a.style, a.slot, a.axes) for a in program] == [
        ("float8", "precision", ()),
        ("colwise", "params", ("tp",)),
    ]


def test_the_exported_code_gathers_the_same_in_float8() -> None:
    setup = llama("parallel=fsdp2", in_float8("tensorwise", GATHERED))
    with torch.device("meta"):
        model = setup.build_model()
    program = setup.compile(model)
    code = export(program, model, observe(model, setup.workload))
    (places, ledger), (same, exported) = both(program, model, code, setup.workload, setup.loss())
    assert same == places
    # The copied code does not say for which unit it finds largest values.
    assert [(e.kind, e.payload_bytes, e.dtype) for e in exported] == [
        (e.kind, e.payload_bytes, e.dtype) for e in ledger
    ]
    assert "uint8" in {e.dtype for e in ledger}


def test_the_exported_code_casts_the_same_inputs() -> None:
    setup = llama("parallel=tp2", in_float8("tensorwise", CAST))
    with torch.device("meta"):
        model = setup.build_model()
    program = setup.compile(model)
    code = export(program, model, observe(model, setup.workload))
    ours, exported = both(program, model, code, setup.workload, setup.loss())
    assert exported == ours
    assert "gather=gather_input_in_float8" in code and "uint8" in {e.dtype for e in ours[1]}


@pytest.mark.slow
def test_the_exported_code_multiplies_experts_the_same() -> None:
    pytest.importorskip("transformers", reason="the optional extra `hf`")
    rule = EXPERTS_IN_FLOAT8.format("rowwise")
    # A file that stands alone makes no masks for a stream that is split.
    whole = ("parallel=tp2", "++parallel.layouts.stream=replicate")
    setup = setup_of("model=hf_qwen3_moe", *MIXTURES["hf_qwen3_moe"], "train.seq_len=16", *whole, rule)
    with torch.device("meta"):
        model = setup.build_model()
    program = setup.compile(model)
    code = export(program, model, observe(model, setup.workload))
    ours, exported = both(program, model, code, setup.workload, setup.loss())
    assert exported == ours
    assert 'run_experts_in_float8(layer.mlp.experts, "rowwise", emulate=mesh.device_type == "cpu")' in code


@pytest.mark.parametrize("preset", ["fsdp2_tp2"])
def test_the_exported_code_places_and_sends_the_same(preset: str) -> None:
    rules = "rules=['layers.*.{attention.w[qkvo],feed_forward.w[123]}: {style: float8, recipe: rowwise}']"
    setup = llama(f"parallel={preset}", rules)
    with torch.device("meta"):
        model = setup.build_model()
    program = setup.compile(model)
    code = export(program, model, observe(model, setup.workload))
    ours, exported = both(program, model, code, setup.workload, setup.loss())
    assert exported == ours
    assert 'run_in_float8(layer.attention.wq, "rowwise", emulate=mesh.device_type == "cpu")' in code


@pytest.mark.parametrize(
    ("capability", "recipe", "message"),
    [
        ((8, 0), "tensorwise", "Mocked has no units for float8"),
        ((8, 9), "tensorwise", None),
        ((8, 9), "rowwise", "Mocked has compute capability 8.9, and kernels for the recipe rowwise need 9.0"),
        ((8, 9), "rowwise-gw-hp", "kernels for the recipe rowwise-gw-hp need 9.0"),
        ((9, 0), "rowwise", None),
        ((12, 1), "rowwise-gw-hp", None),
    ],
)
def test_a_rank_refuses_a_gpu_without_kernels_for_its_recipe(
    capability: tuple[int, int], recipe: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is mocked, and what a rank would do with its linear is run: without emulation it asks for the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Mocked")
    text = f"rules: {{inner: {{style: float8, recipe: {recipe}}}}}"
    [application] = compiled(text, around(nn.Linear, 32, 32)).applications
    linear = nn.Linear(32, 32)
    live = cast(Any, SimpleNamespace(mesh=SimpleNamespace(device_type="cuda")))
    if message is None:
        prepare(application, linear, live)
        assert computes_in_float8(linear)
        return
    with pytest.raises(PlanError, match=re.escape(message)) as raised:
        prepare(application, linear, live)
    assert marked(text, raised.value.diagnostics[0]) == "inner"
    assert not computes_in_float8(linear)
