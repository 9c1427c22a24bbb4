"""Hardware that cannot compute a recipe of float8 is an error at the rule that asks for it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from parallelizer.configuration.float8_hardware import float8_hardware
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from tests.findings import compiled, marked
from tests.simulate.setups import in_float8, llama
from tests.styles.models import around

pytest.importorskip("torchao", reason="float8 needs torchao")

ADA = {"name": "L40S", "bf16_tflops": 362, "fp8_tflops": 733, "capability": 8.9}


def found(rule: str, **changes: Any) -> list[Diagnostic]:
    program = compiled(f"rules: {{inner: {rule}}}", around(nn.Linear, 32, 32))
    return list(float8_hardware(program, {**ADA, **changes}))


def test_scales_of_rows_need_a_higher_capability_than_one_scale() -> None:
    assert found("float8") == []
    for recipe in ("rowwise", "rowwise-gw-hp"):
        rule = f"{{style: float8, recipe: {recipe}}}"
        [error] = found(rule)
        assert error.code == "precision-hardware"
        assert (
            error.message == f"L40S has compute capability 8.9, and kernels for the recipe {recipe} need 9.0"
        )
        assert marked(f"rules: {{inner: {rule}}}", error) == "recipe"
        assert found(rule, capability=9.0) == found(rule, capability=10.3) == []
        assert found(f"{{style: float8, recipe: {recipe}, emulate: true}}") == []


def test_a_file_without_a_capability_is_judged_by_its_speeds() -> None:
    rule = "{style: float8, recipe: rowwise}"
    assert found(rule, capability=None) == []
    assert found(rule, capability=None, fp8_tflops=None)[0].message == "L40S has no units for float8"
    assert found(rule, capability=8.0)[0].message == "L40S has no units for float8"


@pytest.mark.parametrize("capability", [9, "sm_90", "9.0a"])
def test_another_text_than_a_capability_is_an_error(capability: object) -> None:
    [error] = found("float8", capability=capability)
    assert error.message.startswith(f"hardware.capability={capability} is no compute capability")


@pytest.mark.parametrize(("name", "refused"), [("a100", True), ("h100", False), ("gb300", False)])
def test_the_shipped_files_say_what_their_devices_have(name: str, refused: bool) -> None:
    setup = llama("model.n_layers=1", f"hardware={name}", in_float8("rowwise"))
    assert "capability" in setup.hardware
    if refused:
        with pytest.raises(PlanError, match="has no units for float8"):
            setup.compile(setup.build_model())
    else:
        setup.compile(setup.build_model())
