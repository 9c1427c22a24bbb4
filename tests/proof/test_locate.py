"""What differs where every output, gradient and parameter is right, and what governs a place."""

from __future__ import annotations

from typing import Any

import pytest

from parallelizer.proof import observe
from parallelizer.proof.divergence import governing_rule
from tests.findings import compiled, mesh_of
from tests.proof import subjects
from tests.proof.faults import Fault, found_rightly, proof_of, replaced
from tests.styles.experts.models import Mixture
from tests.styles.models import around


def _doubled(right: Any, *args: Any) -> Any:
    return {k: v * 2 if k == "norm.weight:exp_avg" else v for k, v in right(*args).items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "fault",
    [
        Fault(
            "an optimizer state doubled behind the last step",
            ("parallel=tp2",),
            replaced(observe, "_states", _doubled),
            "norm",
            "optimizer",
            None,
            "the optimizer's exp_avg of norm.weight is tp (2) times the reference after the last step",
        ),
        Fault(
            "logits put back in another order",
            ("parallel=cp2",),
            replaced(observe, "unshard", lambda right, *args, **kwargs: right(*args, **kwargs).flip(1)),
            "",
            "evaluation",
            None,
            "the logits in evaluation, put back in the original order",
        ),
    ],
    ids=lambda fault: fault.name,
)
def test_what_differs_behind_the_last_step_is_found(fault: Fault) -> None:
    proof = proof_of(fault)
    assert found_rightly(fault, proof), proof.divergence


@pytest.mark.parametrize(
    ("preset", "module", "axis", "key"),
    [
        ("fsdp2_tp2", "layers.1.attention.wq", "tp", "layers.*.attention.w[qkv]"),
        ("fsdp2_tp2", "layers.1.attention.wq", "dp_shard", "layers.*"),
        ("fsdp2_tp2", "layers.1.attention.wq", None, "layers.*.attention.w[qkv]"),
        ("fsdp2_tp2", "layers.1.attention.inner", "tp", "layers.*.attention"),
        ("fsdp2", "layers.1.attention.wq", None, "layers.*"),
        ("fsdp2", "norm", None, ""),
        ("cp2", "layers.0.attention.inner", "cp", "layers.*.attention.inner"),
        ("tp2", "layers.0", "tp", None),
    ],
)
def test_the_rule_that_governs_a_module_on_an_axis(
    preset: str, module: str, axis: str | None, key: str | None
) -> None:
    setup = subjects.setup(f"parallel={preset}")
    rule = governing_rule(setup.compile(setup.build_model()), module, axis)
    assert (rule.key if rule else None) == key


@pytest.mark.parametrize("axis", ["dp_shard", "tp", "dp_shard x tp", None])
def test_the_rule_of_experts_governs_them_on_every_axis_that_ep_is_taken_out_of(axis: str | None) -> None:
    text = 'rules: {inner.experts: experts, "": fsdp}'
    program = compiled(text, around(Mixture), mesh_of(dp_shard=2, tp=2, ep=4))
    found = governing_rule(program, "inner.experts", axis)
    assert found is not None and found.key == "inner.experts"
