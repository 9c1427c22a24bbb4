"""The learning rate in closed form, the groups, and one optimizer over plain tensors and DTensors."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import nn

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.optim import build_optimizer, learning_rate, optimizer_of
from parallelizer.training.settings import SCHEDULES

ROOT = Path(__file__).parents[1]


def config(**changes: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(ROOT / "configs/optim/adamw.yaml"), changes)


@given(
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    step=st.integers(0, 300),
    final_ratio=st.floats(0, 1),
)
def test_the_learning_rate_is_the_closed_form(warmup: int, total: int, step: int, final_ratio: float) -> None:
    rate = learning_rate(step, peak=3.0, warmup=warmup, total=total, final_ratio=final_ratio)
    if step < warmup:
        expected = 3.0 * (step + 1) / warmup
    elif step >= total - 1:
        expected = 3.0 * final_ratio
    else:
        angle = math.pi * (step + 1 - warmup) / (total - warmup)
        expected = 3.0 * final_ratio + 3.0 * (1 - final_ratio) * math.cos(angle / 2) ** 2
    assert rate == pytest.approx(expected, abs=1e-12)


def test_the_learning_rate_of_a_run_written_out() -> None:
    rates = [learning_rate(step, peak=1.0, warmup=2, total=6, final_ratio=0.2) for step in range(7)]
    half = 0.4 * (1 + math.sqrt(0.5))
    assert rates == pytest.approx([0.5, 1.0, 0.2 + half, 0.6, 1.0 - half, 0.2, 0.2])


@given(
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    step=st.integers(0, 300),
    final_ratio=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_every_schedule_is_its_closed_form(
    warmup: int, total: int, step: int, final_ratio: float, decay: float
) -> None:
    def rate(schedule: str) -> float:
        return learning_rate(
            step,
            peak=3.0,
            warmup=warmup,
            total=total,
            final_ratio=final_ratio,
            schedule=schedule,
            decay=decay,
        )

    def line(first: int) -> float:
        """From 3 at `first` steps done to 3 * final_ratio at `total`."""
        share = 1.0 if total <= first else min(1.0, max(0.0, (step + 1 - first) / (total - first)))
        return 3.0 + (3.0 * final_ratio - 3.0) * share

    if step < warmup:
        expected = dict.fromkeys(SCHEDULES, 3.0 * (step + 1) / warmup)
    else:
        down = max(warmup, total - round(decay * total))
        stays = step + 1 <= down
        expected = {
            "constant": 3.0,
            "linear": line(warmup),
            "wsd": 3.0 if stays else line(down),
            "cosine": learning_rate(step, peak=3.0, warmup=warmup, total=total, final_ratio=final_ratio),
        }
    assert {schedule: rate(schedule) for schedule in SCHEDULES} == pytest.approx(expected, abs=1e-12)


def test_wsd_written_out() -> None:
    rates = [
        learning_rate(step, peak=1.0, warmup=2, total=10, final_ratio=0.0, schedule="wsd", decay=0.4)
        for step in range(11)
    ]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])


@pytest.mark.parametrize(
    ("target", "keys", "expected"),
    [
        ("torch.optim.SGD", {"momentum": 0.9, "weight_decay": 0.3}, {"momentum": 0.9}),
        ("torch.optim.Adafactor", {}, {}),
        ("torch.optim.AdamW", {"betas": [0.8, 0.9], "fused": "auto"}, {"betas": (0.8, 0.9), "fused": True}),
        ("torch.optim.Adam", {"fused": "auto"}, {"fused": True}),
        ("torch.optim.Adam", {"fused": "auto", "foreach": True}, {"fused": None, "foreach": True}),
        ("torch.optim.Adam", {}, {"fused": None}),
        ("torch.optim.SGD", {"fused": "auto"}, {"fused": None}),  # DTensors cannot take its kernel
        ("torch.optim.Rprop", {}, {}),
    ],
)
def test_a_class_of_optimizers_is_given_groups_and_the_keys(
    target: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    name = target.rpartition(".")[2]
    kind = getattr(torch.optim, name)
    schedule = {"warmup": 3, "final_ratio": 0.1, "schedule": "wsd", "decay": 0.2}
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = optimizer_of(kind, model, {"_target_": target, "lr": 0.1, **keys, **schedule})
    assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.1
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    for group in optimizer.param_groups:
        if "weight_decay" in keys:
            assert group["weight_decay"] == (0.3 if group["params"][0].ndim == 2 else 0.0)


def test_only_matrices_decay_and_frozen_parameters_stay_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(model, config(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.bias": 0.0}
    assert decay == {id(model.get_parameter(name)): value for name, value in expected.items()}


@pytest.mark.parametrize("fused", ["auto", True, False])
def test_a_step_is_the_published_update(fused: bool | str) -> None:
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    optimizer = build_optimizer(
        model, config(lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.3, fused=fused)
    )
    w = model.weight.detach().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in (1, 2, 3):
        grad = torch.sin(torch.arange(6.0, dtype=torch.float64) + t).view(2, 3)
        model.weight.grad = grad.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        w = w * (1 - 0.1 * 0.3) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    torch.testing.assert_close(model.weight.detach(), w, rtol=1e-12, atol=1e-12)


def test_auto_is_fused_on_cpu_and_not_on_meta() -> None:
    assert build_optimizer(nn.Linear(2, 2), config()).defaults["fused"] is True
    assert build_optimizer(nn.Linear(2, 2, device="meta"), config()).defaults["fused"] is None


@pytest.mark.parametrize(
    "changes", [{"lr": -1.0}, {"betas": [0.9, 1.5]}, {"eps": -1.0}, {"betas": 3}, {"lr": "x"}]
)
def test_values_that_adamw_refuses_are_diagnosed(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        build_optimizer(nn.Linear(2, 2), config(**changes))
    assert [d.code for d in caught.value.diagnostics] == ["optim-invalid"]


MIXED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from parallelizer.optim import build_optimizer

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

def model(sharded):
    torch.manual_seed(0)
    places = {"b": (mesh["tp"], [Shard(0)]), "c": (mesh["dp"], [Replicate()]), "d": (mesh, [Shard(0)] * 2)}
    values = {name: torch.randn(4, 3) for name in "abcd"}
    if sharded:
        values |= {name: distribute_tensor(values[name], *place) for name, place in places.items()}
    return nn.ParameterDict(values)

ends = []
for sharded in (False, True):
    for fused in ("auto", False):
        m = model(sharded)
        config = dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused)
        optimizer = build_optimizer(m, config)
        assert optimizer.defaults["fused"] is (True if fused else None)
        for _ in range(3):
            for p in m.values():
                p.grad = p.detach().clone()
            optimizer.step()
        ends.append([getattr(p.detach(), "full_tensor", p.detach)() for p in m.values()])
for end in ends[1:]:
    for value, expected in zip(end, ends[0]):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_plain_tensors_and_dtensors_of_several_meshes_step_together() -> None:
    # A process of its own, because one that has had a process group can fork no ranks.
    done = subprocess.run(
        [sys.executable, "-c", MIXED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
