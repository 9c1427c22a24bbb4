"""What a rank holds, by arithmetic, against what it really holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import parallelizer as pz
from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.language.placement import from_torch
from parallelizer.language.plan import FOLDED, Mesh, Plan
from tests.chosen import a_fifth
from tests.findings import compiled, mesh_of, on_meta
from tests.parity import plan, style_defaults
from tests.ranks import run_ranks
from tests.runtime.test_initialize import EXPERTS, LLAMA, PACKED, UNEVEN
from tests.runtime.test_step import llama
from tests.styles.models import Experts, FusedAttention, around

MESHES = [
    {"tp": 4}, {"dp_shard": 4}, {"cp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 4},
]  # fmt: skip
TINY = {"vocab_size": 16, "dim": 16, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 12, "n_layers": 1}
MODELS: list[tuple[Callable[[], nn.Module], Plan, list[dict[str, int]]]] = [
    (llama(**TINY), LLAMA, MESHES),
    (llama(**UNEVEN, n_layers=1), LLAMA, [m for m in MESHES if m.get("tp", 1) < 4]),
    (llama(tie_embeddings=True, n_layers=1), LLAMA, [{"tp": 4}, {"dp_shard": 2, "tp": 2}]),
    (around(FusedAttention), PACKED, [{"dp_shard": 2, "tp": 2}]),
    (
        around(Experts),
        EXPERTS,
        [{"tp_outer": 2, "tp": 2}, {"tp_outer": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}],
    ),
]
OPTIONS: list[dict[str, Any]] = [{}, {"shard_dim": "largest"}, {"min_size": 100}]


@pytest.mark.ranks
@pytest.mark.parametrize("shift", a_fifth(range(len(OPTIONS))))
def test_the_arithmetic_agrees_with_live_parameters_on_every_rank(shift: int) -> None:
    """On every mesh with one of the options, on other days with the others."""

    def worker() -> int:
        count = 0
        for build, rules, meshes in MODELS:
            for place, sizes in enumerate(meshes):
                options = OPTIONS[(place + shift) % len(OPTIONS)]
                mesh = pz.build_mesh(Mesh(sizes), "cpu")
                model = on_meta(build)
                program = pz.compile(rules, model, mesh, defaults=style_defaults({"fsdp": options}))
                expected = parameter_shards(program, model, dist.get_rank())
                pz.materialize(pz.apply(program, model, mesh), device="cpu", seed=1)
                live = dict(model.named_parameters())
                assert list(live) == [s.name for s in expected]
                for one in expected:
                    where = f"{one.name} on {sizes} with {options}"
                    param = live[one.name]
                    local = param.to_local() if isinstance(param, DTensor) else param
                    assert tuple(param.shape) == one.global_shape, where
                    assert tuple(local.shape) == one.local_shape, where
                    assert local.nbytes == one.bytes, where
                    assert f"torch.{one.dtype}" == str(local.dtype), where
                    assert placements(param) == {
                        a: p for a, p in one.placements.items() if p != "replicate"
                    }, where
                    assert set(one.placements) == axes(sizes), where
                    count += 1
        return count

    counts = run_ranks(worker, 4)
    assert counts[0] > 150 and len(set(counts)) == 1


def placements(param: nn.Parameter) -> dict[str, str]:
    """The placements of a live parameter that are no replicas, by axis above 1."""
    if not isinstance(param, DTensor):
        return {}
    names = param.device_mesh.mesh_dim_names
    assert names is not None
    found = zip(names, param.placements, param.device_mesh.shape, strict=True)
    return {n: str(from_torch(p)) for n, p, size in found if size > 1 and not isinstance(p, Replicate)}


def axes(sizes: dict[str, int]) -> set[str]:
    above = {a for a, n in sizes.items() if n > 1}
    return above - {"dp_shard", "cp"} | {FOLDED} if {"dp_shard", "cp"} <= above else above


@settings(deadline=None)
@given(
    st.sampled_from(
        [
            {"tp": 2, "dp_shard": 3},
            {"tp_outer": 2, "tp": 2, "cp": 2},
            {"dp_replicate": 2, "dp_shard": 5, "cp": 2},
        ]
    ),
    st.sampled_from(["0", "largest"]),
)
def test_all_ranks_together_hold_every_parameter_as_often_as_it_is_replicated(
    sizes: dict[str, int], dim: str
) -> None:
    mesh = mesh_of(**sizes)
    model = on_meta(around(Experts))
    placed = "{up: {tp_outer: shard(0), tp: shard(2)}, down: {tp: shard(1)}}"
    text = f'rules:\n  inner: {{style: shard-params, params: {placed}}}\n  "": fsdp'
    text += "\n  before: colwise\nbuffers: {batch: {input_ids: 1}}"
    program = pz.compile(
        plan(text), model, mesh, defaults=style_defaults({"fsdp": {"shard_dim": dim}}), force=True
    )
    by_rank = [parameter_shards(program, model, rank) for rank in range(mesh.world_size)]
    for name, shards in zip([s.name for s in by_rank[0]], zip(*by_rank, strict=True), strict=True):
        copies = 1
        for axis, placement in shards[0].placements.items():
            if placement == "replicate":
                copies *= mesh.size(*axis.split("+"))
        held = sum(torch.empty(s.local_shape, device="meta").numel() for s in shards)
        assert held == copies * model.get_parameter(name).numel()


def test_styles_and_reasons_are_told() -> None:
    program = compiled(
        "extends: llama", llama(**TINY), mesh_of(dp_shard=2, tp=2), options={"fsdp": {"min_size": 20}}
    )
    shards = {s.name: s for s in parameter_shards(program, on_meta(llama(**TINY)))}
    assert shards["layers.0.attention.wq.weight"].styles == ("colwise", "fsdp")
    assert shards["norm.weight"].styles == ("sequence", "fsdp")
    assert (shards["norm.weight"].reason, shards["norm.weight"].placements) == (
        "too small",
        {"dp_shard": "replicate", "tp": "replicate"},
    )
    assert shards["layers.0.attention.wq.weight"].reason is None
