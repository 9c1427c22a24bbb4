"""Which models only their constructor can fill, and that they then have its values, on every mesh."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.runtime.constructor_values import (
    filled_at,
    look,
    needs_whole,
    told,
    watched,
    without_initializer,
)
from parallelizer.runtime.initialize import built_whole
from tests.parity import plan
from tests.ranks import run_ranks


class Bare(nn.Module):
    """Its parameter and its buffer have values that no method makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.register_buffer("table", torch.arange(8.0) ** 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.table


class Scaled(nn.Sequential):
    """As GPT-2: its constructor goes over its parts and fills them anew."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 8))
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.001)


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.data.normal_(0, 0.02)


class InPlace(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        with torch.no_grad():
            self.weight *= 0.5


class Tidy(nn.Module):
    """All it holds is made by modules' own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4, padding_idx=0)])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.parts[2].weight
        self.double = 2 * self.head.weight.shape[0]


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = watched(build)
    return model


@pytest.mark.parametrize("build", [Scaled, ByData, InPlace])
def test_a_constructor_that_fills_parameters_is_seen_where_it_does(build: type[nn.Module]) -> None:
    model = on_meta(build)
    place = filled_at(model)
    assert place is not None and place.rpartition(":")[0] == __file__
    assert needs_whole(model, None) and not needs_whole(model, "modules") and needs_whole(model, "whole")


@pytest.mark.parametrize(
    "build",
    [
        Tidy,
        lambda: nn.TransformerEncoderLayer(8, 2),
        lambda: nn.LSTM(4, 4),
        lambda: nn.Sequential(nn.Linear(2, 2)),
    ],
)
def test_what_modules_make_of_their_own_is_no_reason(build: Callable[[], nn.Module]) -> None:
    assert filled_at(on_meta(build)) is None


def looked_at(build: Callable[[], nn.Module]) -> nn.Module:
    """As somebody's own Python builds it: nobody has watched the constructor."""
    with torch.device("meta"):
        model = build()
    look(model)
    return model


@pytest.mark.parametrize(
    ("build", "where"),
    [(Scaled, "0.weight"), (InPlace, "weight"), (ByData, f"{__file__}:")],
)
def test_a_constructor_that_nobody_watched_is_seen_too(build: type[nn.Module], where: str) -> None:
    assert (filled_at(looked_at(build)) or "").startswith(where)


@pytest.mark.parametrize(
    "build",
    [
        Tidy,
        lambda: nn.LSTM(4, 4),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(torch.bfloat16),
        lambda: nn.Embedding(4, 4, padding_idx=0),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
)
def test_what_modules_make_of_their_own_is_no_reason_where_nobody_watched(
    build: Callable[[], nn.Module],
) -> None:
    assert filled_at(looked_at(build)) is None


@pytest.mark.parametrize("build", [Scaled, ByData])
@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [False, True])
def test_materialize_refuses_to_lose_what_a_constructor_fills(build: type[nn.Module], parallel: bool) -> None:
    with torch.device("meta"):
        model = build()
    if parallel:
        run_ranks(_refused, 2, build)
    else:
        with pytest.raises(PlanError, match="fills parameters itself") as raised:
            pz.materialize(model, device="cpu", seed=0)
        assert "whole=" in (raised.value.diagnostics[0].help or "")
        assert all(p.is_meta for p in model.parameters())
        pz.materialize(model, device="cpu", seed=0, whole=build)
        assert not any(p.is_meta for p in model.parameters())


def _refused(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(build())
    mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
    pz.parallelize(model, plan("rules: {'': fsdp}"), mesh)
    with pytest.raises(PlanError, match="fills parameters itself"):
        pz.materialize(model, device="cpu", seed=0)


def test_an_initializer_that_is_given_is_taken_for_meant() -> None:
    with torch.device("meta"):
        model = Scaled()
    pz.materialize(
        model,
        device="cpu",
        seed=0,
        initializer=lambda m: [nn.init.ones_(p) for p in m.parameters(False)] and None,
    )
    assert model[0].weight.sum() == model[0].weight.numel()


def test_modules_that_hold_something_and_cannot_fill_it_are_named() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Bare(), nn.Dropout(), Bare()))
    assert without_initializer(model) == ["1", "3"]
    [found] = told(model, "modules")
    assert (found.code, found.severity) == ("built-whole", "warning")
    assert found.message == (
        "every rank builds the whole model, 152 B, and keeps its part of the values: "
        "no method initializes the parameters of {1,3} (Bare)"
    )
    assert told(model, "whole") == ()


def test_nothing_is_told_of_models_that_fill_themselves_or_have_values() -> None:
    assert told(on_meta(Tidy), None) == ()
    assert without_initializer(Bare()) == []
    assert "its constructor fills parameters itself" in told(on_meta(Scaled), None)[0].message
    assert told(on_meta(Scaled), "modules") == ()


def test_values_are_the_constructors_on_every_mesh() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Scaled(), Bare())

    expected = built_whole(build, 3).state_dict()

    def check() -> None:
        mesh = pz.build_mesh(Mesh({"dp_shard": 2, "tp": 2}), "cpu")
        model = on_meta(build)
        rules = plan("rules: {'0.0': colwise, '0.1': rowwise, '': fsdp}")
        pz.parallelize(model, rules, mesh)
        pz.materialize(model, device="cpu", seed=3, whole=build)
        found = pz.whole_state_dict(model)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        assert found["0.0.weight"].std() < 0.01

    run_ranks(check, 4)


def test_the_random_numbers_of_all_three_are_seeded_and_then_as_they_were() -> None:
    def build() -> nn.Module:
        values = [torch.randn(()).item(), random.random(), float(numpy.random.rand())]
        return nn.ParameterList([torch.tensor(values)])

    before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy())
    one, two, other = (built_whole(build, seed).state_dict()["0"] for seed in (1, 1, 2))
    assert torch.equal(one, two) and bool((one != other).all())
    assert torch.equal(before[0], torch.get_rng_state()) and random.getstate() == before[1]
    assert (numpy.random.get_state()[1] == before[2]).all()


def test_what_a_constructor_leaves_unfilled_is_refused() -> None:
    def build() -> nn.Module:
        return nn.ParameterList([torch.empty(2)])

    with pytest.raises(PlanError) as raised:
        pz.materialize(on_meta(build), device="cpu", seed=0, whole=build)
    assert raised.value.diagnostics[0].code == "no-initializer"


def test_what_a_family_leaves_unfilled_takes_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    monkeypatch.setattr("parallelizer.runtime.constructor_values.initializer_of", lambda model: fill)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Bare())
    assert without_initializer(model) == ["1"]
    assert needs_whole(model, None)
    assert not needs_whole(nn.Sequential(model[0]), None)
