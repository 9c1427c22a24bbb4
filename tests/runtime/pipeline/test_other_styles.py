"""Stages beside styles that the table of pipelines does not have: proven, and their gathers counted."""

from __future__ import annotations

import pytest

from parallelizer.proof.prove import prove
from tests.chosen import chosen
from tests.proof.subjects import setup
from tests.simulate.real_ledger import real_ledgers
from tests.simulate.setups import llama, traced

CASES = {
    "hsdp": ("parallel=pp2_fsdp2", "parallel.mesh.dp_replicate=2"),
    "replicate_kv": (
        "parallel=pp2_tp2",
        "model.n_kv_heads=1",
        'rules=["layers.*.attention.w[kv]: {style: colwise, replicate_kv: true}"]',
    ),
    "compile": ("parallel=pp2", 'rules=["layers.*: {style: compile, backend: aot_eager}"]'),
    "compile in split backwards": (
        "parallel=pp2",
        "model.n_layers=4",
        "parallel.pipeline.schedule=zbv",
        'rules=["layers.*: {style: compile, backend: aot_eager}"]',
    ),
    "resharded": ("parallel=pp2_fsdp2", "++parallel.styles.fsdp.reshard_after_forward=true"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", chosen(CASES, ("compile",)))
def test_stages_beside_another_style_are_proven(case: str) -> None:
    proof = prove(setup(*CASES[case]), full_mesh=True)
    assert proof.passed, str(proof)


@pytest.mark.parametrize("schedule", chosen(("1f1b", "zbv"), ("1f1b",)))
def test_reshard_after_forward_says_how_often_a_stage_gathers(schedule: str) -> None:
    """Once a step, or once in every forward and once in every backward. The first stage has no inputs that want a gradient, so
    its backward for weights is a whole one.
    """
    microbatches = 4
    words = ("parallel=pp2_fsdp2", f"parallel.pipeline.schedule={schedule}", "model.n_layers=4")
    calls = {}
    for keep in ("false", "true"):
        ledger = traced(llama(*words, f"++parallel.styles.fsdp.reshard_after_forward={keep}"), 0).ledger
        own = [e for e in ledger if e.module == "layers.0" and e.axis == "dp_shard"]
        calls[keep] = {kind: sum(e.kind == kind for e in own) for kind in ("all_gather", "reduce_scatter")}
    assert calls["false"] == {"all_gather": 1, "reduce_scatter": 1}
    assert calls["true"] == {"all_gather": 2 * microbatches, "reduce_scatter": 1}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ("1f1b", "zbv"))
@pytest.mark.parametrize("keep", ("false", "true"))
def test_real_ranks_gather_as_often(schedule: str, keep: str) -> None:
    one = llama(
        "parallel=pp2_fsdp2", f"parallel.pipeline.schedule={schedule}", "model.n_layers=4",
        f"++parallel.styles.fsdp.reshard_after_forward={keep}",
    )  # fmt: skip
    [real] = real_ledgers([one])
    assert traced(one, 0).ledger == real[0]
