"""Dropout on ranks: other masks on parts of a tensor, one mask on what all hold, the same again when recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, _dispatch, _random

import parallelizer as pz
from parallelizer import torch_private
from parallelizer.language.plan import Mesh
from parallelizer.styles import random_numbers
from tests.parity import VOCAB, plan, token_batch, token_loss
from tests.ranks import run_ranks

P = 0.25
WIDTH = 4096


class Dropping(nn.Module):
    """Drops features that are split over tp, and the stream, which is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.up, self.drop, self.down = nn.Linear(16, WIDTH), nn.Dropout(P), nn.Linear(WIDTH, 16)
        self.whole = nn.Dropout(P)
        self.masks: dict[str, Tensor] = {}
        for name in ("drop", "whole"):
            self.get_submodule(name).register_forward_hook(self._keep(name))

    def _keep(self, name: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            self.masks[name] = (output != 0).detach()

        return hook

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.drop(1 + F.relu(self.up(self.embed(input_ids))))
        logits: Tensor = self.head(self.whole(self.down(hidden)))
        return logits


RULES = "up: colwise, down: rowwise, drop: local-random, head: {style: replicate, grad: replicate}"


def run(sizes: dict[str, int], rules: str, steps: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The masks of the first step, and the parameters after the last, of this rank."""
    mesh = pz.build_mesh(Mesh(sizes), "cpu")
    with torch.device("meta"):
        model = Dropping()
    pz.parallelize(model, plan(f"rules: {{{rules}}}"), mesh)
    pz.materialize(model, device="cpu", seed=3)
    pz.seed_ranks(mesh, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks: dict[str, Tensor] = {}
    for _ in range(steps):
        pz.train_step(model, token_batch(), token_loss, optimizer)
        masks = masks or dict(model.masks)
    params = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return masks, {n: p.detach().clone() for n, p in params.items()}


def on_all(value: Tensor) -> list[Tensor]:
    """What every rank has of it."""
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return parts


@pytest.mark.ranks
def test_parts_are_dropped_apart_and_replicas_alike() -> None:
    def worker() -> None:
        masks, params = run({"tp": 2}, RULES, steps=2)
        one, other = on_all(masks["drop"].to(torch.uint8))
        assert abs((one == other).double().mean() - (P**2 + (1 - P) ** 2)) < 5e-3  # independent
        for mask in (one, other):
            assert abs(mask.double().mean() - (1 - P)) < 5e-3
        one, other = on_all(masks["whole"].to(torch.uint8))
        assert torch.equal(one, other) and 0 < one.double().mean() < 1
        for name, param in params.items():  # replicas do not drift
            one, other = on_all(param)
            assert torch.equal(one, other), name
        again, values = run({"tp": 2}, RULES, steps=2)
        assert all(torch.equal(again[n], masks[n]) for n in masks)
        assert all(torch.equal(values[n], params[n]) for n in params)

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_a_recomputation_drops_the_same() -> None:
    def worker() -> None:
        _, params = run({"tp": 2}, RULES)
        _, recomputed = run({"tp": 2}, f"'': checkpoint, {RULES}")
        assert all(torch.equal(params[n], recomputed[n]) for n in params)
        _, forgotten = run({"tp": 2}, RULES.replace("drop: local-random, ", ""))
        assert not torch.equal(params["up.weight"], forgotten["up.weight"])

    run_ranks(worker, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate", "cp"])
def test_ranks_with_other_tokens_draw_other_numbers(axis: str) -> None:
    def worker() -> None:
        mesh = pz.build_mesh(Mesh({axis: 2}), "cpu")
        pz.seed_ranks(mesh, 7)
        one, other = on_all(torch.rand(100))
        assert not (one == other).any()
        torch.manual_seed(7)
        assert torch.equal(one, torch.rand(100))  # the first rank draws as one device does

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_the_default_generators_stay_equal_behind_it() -> None:
    def worker() -> None:
        run({"tp": 2}, RULES)
        one, other = on_all(torch.rand(100))
        assert torch.equal(one, other)

    run_ranks(worker, 2)


class AsOnGpus:
    """Stands in for the tracker that DTensor makes on GPUs: it gives every rank the state of rank 0."""

    distribute_region_enabled = True

    def __init__(self, mesh: object, run_state_sync: bool = True) -> None:
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)

    @contextmanager
    def _distribute_region(self, spec: object, generator: torch.Generator | None = None) -> Iterator[None]:
        yield


def dropped_on_dtensors(ours: bool) -> list[bool]:
    mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
    with (
        mock.patch.object(_random, "OffsetBasedRNGTracker", AsOnGpus),
        mock.patch.object(_dispatch, "is_rng_supported_mesh", lambda mesh: True),
    ):
        pz.seed_ranks(mesh, 7)  # as of GPUs: a mesh of CPUs installs nothing
        if ours:
            torch_private.draw_from_own_generators()
        expected = F.dropout(torch.ones(64), 0.5)
        pz.seed_ranks(mesh, 7)
        found = F.dropout(DTensor.from_local(torch.ones(64), mesh, [Replicate()]), 0.5).to_local()
        if ours:
            assert torch.equal(found, expected)
        return (found != 0).tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("ours", [True, False])
def test_dtensors_draw_from_each_ranks_own_generator_on_gpus_too(ours: bool) -> None:
    """Data ranks hold other tokens. Under DTensor's own tracker they would drop the same elements of them."""
    first, second = run_ranks(dropped_on_dtensors, 2, ours)
    assert (first != second) is ours


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_seeding_ranks_of_gpus_keeps_dtensor_from_making_its_tracker(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: Any = SimpleNamespace(device_type=device)
    monkeypatch.setattr(_random, "_rng_tracker", None)
    monkeypatch.setattr(random_numbers, "rename_axes", lambda mesh, axes: mesh)
    monkeypatch.setattr(random_numbers, "describe", lambda mesh: Mesh({"dp_shard": 2}))
    monkeypatch.setattr(random_numbers, "batch_rank", lambda mesh: (1, 2))
    pz.seed_ranks(mesh, 7)
    assert (_random._rng_tracker is not None) is (device == "cuda")
