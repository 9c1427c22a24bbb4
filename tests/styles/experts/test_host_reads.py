"""How often the host waits for a device in the forward and backward of experts that are shared out: once for each layer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.language.plan import Mesh
from parallelizer.simulate.rehearse.host_reads import host_reads
from tests.parity import plan
from tests.ranks import run_ranks
from tests.styles.experts.models import Batched, Called, Mixture
from tests.styles.models import WIDTH

LAYERS = 3
OPTIONS = "{style: experts, tokens: x, ids: chosen, weights: shares, params: {w1: shard(1), w2: shard(1)}, dispatch: %s}"


def _reads_on_a_rank(dispatch: str) -> Mapping[str, int]:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*(Mixture(Batched(), rows=True) for _ in range(LAYERS)))
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    mesh = Mesh({"dp_shard": 2}, ep=2)
    rules = plan(f'rules:\n  "*.experts": {OPTIONS % dispatch}\n  "": fsdp')
    live = pz.build_mesh(mesh, "cpu")
    pz.apply(pz.compile(rules, model, mesh), model, live)
    x = torch.randn(2, 5, WIDTH)
    model(x).sum().backward()  # FSDP reads sizes the first time
    found = host_reads(lambda: model(x).sum().backward(), "cpu")
    return {place: times for place, times in found.items() if place.startswith("styles/experts/")}


@pytest.mark.ranks
@pytest.mark.parametrize("dispatch", ["all-to-all", pytest.param("all-gather", marks=pytest.mark.slow)])
def test_once_for_each_layer(dispatch: str) -> None:
    for places in run_ranks(_reads_on_a_rank, 2, dispatch):
        assert list(places.values()) == [LAYERS], places


def test_a_list_of_experts_reads_its_counts_once() -> None:
    model = Called()
    found = host_reads(lambda: model(torch.randn(2, 5, WIDTH)).sum().backward(), "cpu")
    ours = {place: times for place, times in found.items() if place.startswith("styles/experts/")}
    assert list(ours.values()) == [1], ours
