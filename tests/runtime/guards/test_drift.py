"""What ranks hold alike stays alike under every plan; and one changed number is found, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.runtime.guards import drift
from parallelizer.runtime.guards.drift import Drift, find_drift, ranks_drifted
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.guards.planted import adam, mesh_of, parallel, parts_of


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def trained(mesh: DeviceMesh, plan: str = "llama", steps: int = 1, **options: Any) -> tuple[nn.Module, Any]:
    model = parallel(mesh, plan, options=options)
    optimizer = adam(model)
    for step in range(steps):
        pz.train_step(model, parts_of(mesh, plan, seed=step), token_loss, optimizer, 1.0)
    return model, optimizer


# No false alarm

MESHES: dict[int, dict[str, dict[str, int]]] = {
    2: {"fsdp2": {"dp_shard": 2}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "replicate2": {"dp_replicate": 2}},
    4: {
        "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2}, "fsdp2_tp2": {"dp_shard": 2, "tp": 2},
        "cp2_tp2": {"cp": 2, "tp": 2}, "tp4": {"tp": 4}, "cp4": {"cp": 4}, "fsdp4": {"dp_shard": 4},
        "replicate2_tp2": {"dp_replicate": 2, "tp": 2},
    },
    8: {"fsdp2_cp2_tp2": {"dp_shard": 2, "cp": 2, "tp": 2}},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "": {}, "min_size": {"fsdp": {"min_size": 500}}, "whole": {"fsdp": {"min_size": 10**9}},
    "offloaded": {"fsdp": {"cpu_offload": True}}, "bfloat16": {"fsdp": {"param_dtype": "bfloat16"}},
}  # fmt: skip


def quiet(
    ranks: int, plans: tuple[str, ...], options: tuple[str, ...], steps: int, meshes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What is found where there is nothing, on meshes of so many ranks."""

    def worker() -> dict[str, Any]:
        found = {}
        for name in meshes or MESHES[ranks]:
            mesh = mesh_of(**MESHES[ranks][name])
            for plan in plans:
                for option in options:
                    model, optimizer = trained(mesh, plan, steps, **OPTIONS[option])
                    pz.evaluate(
                        model, parts_of(mesh, plan), token_loss
                    )  # which may leave parameters gathered
                    found[f"{name} {plan} {option}"] = find_drift(model, optimizer)
        return {name: one for name, one in found.items() if one}

    every = run_ranks(worker, ranks)
    assert all(one == every[0] for one in every)
    return every[0]


@pytest.mark.ranks
def test_five_steps_raise_no_alarm() -> None:
    assert quiet(2, ("llama_tp",), ("",), 5, ("fsdp2", "tp2")) == {}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", MESHES)
def test_five_steps_raise_no_alarm_on_any_mesh(ranks: int) -> None:
    assert quiet(ranks, ("llama", "llama_tp"), ("",), 5) == {}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_option_of_fsdp_raises_an_alarm(ranks: int) -> None:
    assert quiet(ranks, ("llama",), tuple(OPTIONS), 2) == {}


@pytest.mark.ranks
def test_what_no_other_rank_holds_is_not_read() -> None:
    def worker() -> set[tuple[int, ...]]:
        read = []
        original = drift.checksum
        drift.checksum = lambda tensor: read.append(tuple(tensor.shape)) or original(tensor)  # type: ignore[func-returns-value]
        find_drift(*trained(mesh_of(dp_shard=2)))
        return set(read)

    assert run_ranks(worker, 2) == [{()}] * 2  # AdamW's numbers of steps; everything else is dealt out


# Alarms


def nudged(tensor: Tensor, rank: int, by: float = 1.0) -> None:
    """Add to one element of a rank's own part; to its last bit where nothing is added."""
    part = local(tensor).view(-1)
    if dist.get_rank() == rank and part.numel():
        if by:
            part[-1] += by
        else:
            part.view(torch.int32)[-1] ^= 1


def state(optimizer: Any, model: nn.Module, name: str, key: str) -> Tensor:
    found: Tensor = optimizer.state[model.get_parameter(name)][key]
    return found


NORM, WQ = "layers.0.attention_norm.weight", "layers.1.attention.wq.weight"
Plant = Callable[[nn.Module, Any], None]
Found = list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]
ALL, REPLICAS, SHARDS = (0, 1, 2, 3), {"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}
PLANTED: dict[str, tuple[dict[str, int], Plant, Found]] = {
    "a norm": (REPLICAS, lambda m, o: nudged(m.get_parameter(NORM), 2), [(NORM, "", (2,), ALL)]),
    "its last bit": (REPLICAS, lambda m, o: nudged(m.get_parameter(NORM), 0, 0), [(NORM, "", (0,), ALL)]),
    "a NaN": (REPLICAS, lambda m, o: nudged(m.get_parameter(NORM), 0, torch.nan), [(NORM, "", (0,), ALL)]),
    "a state": (REPLICAS, lambda m, o: nudged(state(o, m, NORM, "exp_avg"), 1), [(NORM, "exp_avg", (1,), ALL)]),
    "a count of steps": (REPLICAS, lambda m, o: nudged(state(o, m, WQ, "step"), 3), [(WQ, "step", (3,), ALL)]),
    "a replica of a shard": (REPLICAS, lambda m, o: nudged(m.get_parameter(WQ), 1), [(WQ, "", (1, 3), (1, 3))]),
    "a state that one rank lacks": (
        REPLICAS,
        lambda m, o: o.state[m.get_parameter(NORM)].pop("exp_avg") if dist.get_rank() == 0 else None,
        [(NORM, "exp_avg", (0,), ALL)],
    ),
    "a shard, alike on no axis": (SHARDS, lambda m, o: nudged(m.get_parameter(WQ), 1), []),
    "a norm's shard": (SHARDS, lambda m, o: nudged(m.get_parameter(NORM), 3), [(NORM, "", (2, 3), (2, 3))]),
}  # fmt: skip


def worker_of_planted() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sizes in (SHARDS, REPLICAS):
        model, optimizer = trained(mesh_of(**sizes))
        for name, (of, plant, _) in PLANTED.items():
            if of != sizes:
                continue
            assert find_drift(model, optimizer) == (), f"an alarm before {name}"
            states = {param: dict(own) for param, own in optimizer.state.items()}
            tensors = [*model.parameters(), *(t for own in states.values() for t in own.values())]
            values = [local(t).clone() for t in tensors]
            plant(model, optimizer)
            found[name] = find_drift(model, optimizer)
            optimizer.state.update(states)
            for tensor, value in zip(tensors, values, strict=True):
                local(tensor).copy_(value)
    model.register_buffer("seen", torch.tensor(float(dist.get_rank() == 3)))
    model.register_buffer("scratch", torch.tensor(float(dist.get_rank())), persistent=False)
    found["a buffer"] = find_drift(model)
    for param in model.parameters():
        local(param).mul_(1 + 1e-6 * dist.get_rank())
    model.get_buffer("seen").zero_()
    found["by little"] = find_drift(model), find_drift(model, tolerance=1e-4)
    return found


@pytest.fixture(scope="module")
def planted() -> list[dict[str, Any]]:
    return run_ranks(worker_of_planted, 4)


def named(drifts: tuple[Drift, ...]) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    return [(d.name, d.state, d.ranks, d.among) for d in drifts]


@pytest.mark.ranks
@pytest.mark.parametrize("name", PLANTED)
def test_what_is_changed_on_one_rank_is_named(name: str, planted: list[dict[str, Any]]) -> None:
    assert [named(rank[name]) for rank in planted] == [PLANTED[name][2]] * 4


@pytest.mark.ranks
def test_persistent_buffers_are_compared_and_others_are_not(planted: list[dict[str, Any]]) -> None:
    assert named(planted[0]["a buffer"]) == [("seen", "", (3,), (0, 1, 2, 3))]


@pytest.mark.ranks
def test_how_far_ranks_are_apart_is_measured_and_let_pass_on_demand(planted: list[dict[str, Any]]) -> None:
    exact, tolerant = planted[0]["by little"]
    assert {d.among for d in exact} == {(0, 2), (1, 3), ALL} and tolerant == ()
    assert all(1e-6 < d.difference < 4e-6 for d in exact)
    assert planted[0]["a norm"][0].difference == pytest.approx(0.5, rel=0.1)
    assert planted[0]["a NaN"][0].difference == torch.inf


@pytest.mark.ranks
def test_messages_fold_names_and_name_ranks(planted: list[dict[str, Any]]) -> None:
    message = ranks_drifted(7, planted[0]["a norm"]).message
    assert message == (
        "after step 7 ranks differ in values that should be equal: rank 2 from ranks 0, 1, 3 in layers.0.attention_norm.weight "
        "(by up to 0.5 of the largest value)"
    )
    message = ranks_drifted(7, planted[0]["by little"][0], "warning").message
    assert "ranks 0, 2 from each other in {tok_embeddings,output}.weight, " in message
    norms = "layers.{0,1}.{attention_norm,ffn_norm}.weight, norm.weight"
    assert f"ranks 0 to 3 from each other in {norms} (by" in message
    assert ranks_drifted(7, planted[0]["a NaN"]).message.endswith("(beyond all measure)")


def test_a_model_that_is_not_parallel_has_no_drift() -> None:
    assert find_drift(nn.Linear(2, 2)) == ()
