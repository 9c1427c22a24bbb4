"""Over all shipped models: what is cast to float8 in a followed step are the linears that the plan names, all of them and no
others.
"""

from __future__ import annotations

import pytest
from torch import nn

from benchmarks.proofs.families import families
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.tiny import shrink
from parallelizer.simulate.record.operators import Operator
from tests.simulate.setups import traced

pytest.importorskip("torchao", reason="float8 needs torchao")

MODELS = ["llama_debug", *families()]


def linears(model: nn.Module) -> list[str]:
    """The linears of the repeated layers that a forward calls."""
    reads = ("out_proj",) if any(isinstance(m, nn.MultiheadAttention) for m in model.modules()) else ()
    return [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and any(part.isdigit() for part in path.split("."))
        and not path.endswith(reads)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_named_linears_are_cast_and_no_others(name: str) -> None:
    if name.startswith("hf_"):
        pytest.importorskip("transformers", reason="the optional extra `hf`")
    base = [f"model={name}", "parallel=tp2"]
    small = shrink(from_config(*compose_config(base)))[0]
    named = linears(small.build_model())[::2]  # every second one, so that some are left in their own dtype
    if not named:
        pytest.skip(f"{name} has no linears in its layers")
    rules = ",".join(repr(f"{path}: {{style: float8, emulate: true}}") for path in named)
    setup = shrink(from_config(*compose_config([*base, f"rules=[{rules}]"])))[0]
    try:
        setup.compile(setup.build_model())
    except (
        PlanError
    ) as error:  # a plan whose linears see the shard of their weight alone: refused, and no linear is skipped
        assert {one.code for one in error.diagnostics} == {"precision-local-scale"}
        setup = shrink(from_config(*compose_config([f"model={name}", "parallel=fsdp2", f"rules=[{rules}]"])))[
            0
        ]
    line = traced(setup).line
    assert {o.module for o in line if isinstance(o, Operator) and o.casts} == set(named)
