"""The ledger of a real step of a mixture is the dry run's, when the routing that ran is given to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from parallelizer.child.children import in_children
from parallelizer.configuration.setup import Setup
from parallelizer.language.routing import Routing
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.trace import record
from tests.chosen import chosen
from tests.simulate.real_ledger import real_steps
from tests.simulate.setups import EXPERTS_IN_FLOAT8, MIXTURES, setup_of, traced

pytest.importorskip("transformers", reason="the optional extra `hf`")
pytestmark = pytest.mark.ranks

MESHES = {
    2: (("dp_shard=2", "ep=2"), ("cp=2", "ep=2"), ("tp=2", "ep=2")),
    4: (("dp_shard=4", "ep=4"), ("dp_shard=4", "ep=2"), ("dp_replicate=2", "dp_shard=2", "ep=2"), ("dp_shard=2", "tp=2", "ep=4")),
}  # fmt: skip
RECOMPUTED = 'rules=["model.layers.*: checkpoint"]'


def cases(ranks: int) -> list[Setup]:
    """Both models on all meshes of so many ranks, and one of them with checkpointed layers."""
    every = [(model, mesh, ()) for model in MIXTURES for mesh in MESHES[ranks]]
    every.append(("hf_qwen3_moe", MESHES[ranks][0], (RECOMPUTED,)))
    return [
        setup_of(
            f"model={model}",
            *MIXTURES[model],
            "train.seq_len=16",
            *(f"parallel.mesh.{axis}" for axis in mesh),
            *more,
        )
        for model, mesh, more in every
    ]


def dry(setup: Setup, routing: Routing) -> list[tuple[Collective, ...]]:
    setup = dataclasses.replace(setup, routing=routing)
    model = setup.build_model()
    program, recipe = setup.compile(model), setup.recipe()
    ranks = range(setup.mesh.world_size)
    return [one.ledger for one in in_children([(record, program, model, recipe, rank) for rank in ranks])]


def check(setups: Sequence[Setup], folder: Path) -> None:
    for setup, (real, routing) in zip(setups, real_steps(setups, folder), strict=True):
        assert len({str(calls) for calls in routing.counted.values()}) > 1  # no two layers are alike
        assert dry(setup, routing) == real, str(setup.mesh)


def test_the_entries_of_a_step_are_those_that_were_sent(tmp_path: Path) -> None:
    check(cases(2)[:1], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MESHES)
def test_the_entries_of_every_case_are_those_that_were_sent(ranks: int, tmp_path: Path) -> None:
    assert sum(len(cases(ranks)) for ranks in MESHES) == 16
    check(cases(ranks), tmp_path)


def test_another_routing_sends_other_bytes(tmp_path: Path) -> None:
    (setup,) = cases(2)[:1]
    (_, routing), *_ = real_steps([setup], tmp_path)
    moved = {
        path: [[[*row[1:], row[0]] for row in table] for table in calls]
        for path, calls in routing.counted.items()
    }
    assert dry(setup, Routing(counted=moved)) != dry(setup, routing)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[2][::2])
def test_the_entries_of_gathered_tokens_are_those_that_were_sent(
    mesh: tuple[str, ...], tmp_path: Path
) -> None:
    rule = 'rules=["model.layers.*.mlp.experts: {style: experts, dispatch: all-gather}"]'
    axes = (f"parallel.mesh.{axis}" for axis in mesh)
    model = "hf_qwen3_moe"
    check([setup_of(f"model={model}", *MIXTURES[model], "train.seq_len=16", *axes, rule)], tmp_path)


def in_float8(recipe: str, *axes: str) -> Setup:
    model = "hf_qwen3_moe"
    sizes = (f"parallel.mesh.{axis}" for axis in axes)
    rule = EXPERTS_IN_FLOAT8.format(recipe)
    return setup_of(f"model={model}", *MIXTURES[model], "train.seq_len=16", *sizes, rule)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("tp=2",), ("dp_shard=2", "ep=2"), ("tp=2", "ep=2")])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise-gw-hp"])
def test_the_entries_of_experts_in_float8_are_those_that_were_sent(
    recipe: str, axes: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    setup = in_float8(recipe, *axes)
    ((real, routing),) = real_steps([setup], tmp_path)
    assert dry(setup, routing) == real
    assert any(e.module.endswith("experts") and e.kind == "all_reduce" for e in real[0]) == (
        "ep=2" not in axes
    )


@pytest.mark.parametrize("recipe", chosen(["rowwise", "rowwise-gw-hp"], ["rowwise-gw-hp"]))
def test_ranks_of_tp_agree_on_the_largest_values_of_rows(recipe: str) -> None:
    """Forward for the way down, whose inputs are split; backward for the way up, whose outputs are."""
    pytest.importorskip("torchao", reason="float8 needs torchao")
    rows, experts, width = 8 * 16 * 2, 8, 64  # each token has two experts
    ledger = traced(in_float8(recipe, "tp=2")).ledger
    found = [(e.phase, e.payload_bytes, e.largest) for e in ledger if e.module.endswith("0.mlp.experts")]
    columns = width if recipe == "rowwise" else 1
    back = [("backward", 4 * (rows + experts * columns), True)]
    # One scale for an expert: the way down has its weights on both ranks too.
    more = [("backward", 4 * experts, True)] if recipe == "rowwise-gw-hp" else []
    assert found == [("forward", 4 * (rows + experts * width), True), *more, *back]
