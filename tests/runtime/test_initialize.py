"""Values: the same on every mesh to the bit, drawn module by module, and nothing forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.language.plan import Mesh, Plan
from parallelizer.runtime.initialize import allocate, materialize
from parallelizer.styles.random_numbers import derived_seed
from parallelizer.styles.tied_parameters import tied_names
from tests.chosen import a_fifth
from tests.findings import on_meta
from tests.parity import gathered, plan, style_defaults
from tests.ranks import run_ranks
from tests.runtime.test_step import llama
from tests.styles.models import Experts, FusedAttention, FusedMlp, around

LLAMA = plan("extends: llama")
PACKED = plan(
    "rules:\n"
    "  inner.qkv: {style: colwise, packed: [q_heads, kv_heads, kv_heads]}\n"
    "  inner: {style: shard-params, divide: [heads, kv_heads]}\n"
    '  inner.out: rowwise\n  "": fsdp\n'
)
EXPERTS = plan(
    "rules:\n  inner: {style: shard-params, params: {up: {tp_outer: shard(2), tp: shard(2)}, down: {tp_outer: shard(0)}}}\n"
    '  "": fsdp'
)
UNEVEN = {"vocab_size": 30, "hidden_dim": 36, "dim": 24, "n_heads": 6, "n_kv_heads": 2}

MODELS: dict[str, tuple[Callable[[], nn.Module], Plan, list[dict[str, int]]]] = {
    "llama": (llama(), LLAMA, [
        {"tp": 4}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 2, "tp": 2}, {"cp": 2, "tp": 2},
    ]),
    "uneven": (llama(**UNEVEN), LLAMA, [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}]),
    "tied": (llama(tie_embeddings=True), LLAMA, [{"tp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 4}]),
    "packed": (around(FusedAttention), PACKED, [{"tp": 2, "dp_shard": 2}]),
    "experts": (around(Experts), EXPERTS, [{"tp_outer": 2, "tp": 2}, {"tp_outer": 2, "dp_shard": 2}]),
}  # fmt: skip


OPTIONS = ({}, {"shard_dim": "largest", "min_size": 100}, {"min_size": 100})


@pytest.mark.ranks
@pytest.mark.parametrize("shift", a_fifth(range(len(OPTIONS))))
def test_full_values_are_bit_identical_on_every_mesh(shift: int) -> None:
    wholes = {
        name: materialize(on_meta(build), device="cpu", seed=7) for name, (build, _, _) in MODELS.items()
    }
    expected = {name: dict(model.named_parameters()) for name, model in wholes.items()}

    def worker() -> int:
        count = 0
        for name, (build, rules, meshes) in MODELS.items():
            for place, sizes in enumerate(meshes):
                options = OPTIONS[(place + shift) % len(OPTIONS)]
                mesh = pz.build_mesh(Mesh(sizes), "cpu")
                model = on_meta(build)
                pz.apply(
                    pz.compile(rules, model, mesh, defaults=style_defaults({"fsdp": options})),
                    model,
                    mesh,
                )
                before = torch.random.get_rng_state()
                pz.materialize(model, device="cpu", seed=7)
                assert torch.equal(torch.random.get_rng_state(), before)
                values = gathered(model, dict(model.named_parameters()))
                assert {n: torch.equal(v, expected[name][n]) for n, v in values.items()} == dict.fromkeys(
                    expected[name], True
                )
                assert tied_names(model) == tied_names(wholes[name])
                for (key, buffer), whole in zip(model.named_buffers(), wholes[name].buffers(), strict=True):
                    assert torch.equal(buffer, whole), key
                count += 1
        return count

    assert run_ranks(worker, 4) == [sum(len(meshes) for *_, meshes in MODELS.values())] * 4


class Layer(nn.Module):
    """Draws as many numbers as it has heads; `table` is a buffer."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads, 2))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.child = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / self.heads)
        self.table.copy_(torch.arange(3.0))


def test_a_module_draws_from_its_own_name() -> None:
    model = nn.Sequential(Layer(), Layer())
    materialize(model, device="cpu", seed=1)
    torch.manual_seed(derived_seed(1, "1.child"))
    alone = nn.Linear(2, 2)
    alone.reset_parameters()
    torch.manual_seed(derived_seed(1, "1.child"))
    alone.reset_parameters()
    assert torch.equal(model[1].child.weight, alone.weight)
    assert not torch.equal(model[0].weight, model[1].weight)


def test_what_a_module_draws_depends_on_no_other() -> None:
    short, longer = nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(3), Layer(), Layer())
    for model in (short, longer):
        materialize(model, device="cpu", seed=1)
    assert torch.equal(short[1].weight, longer[1].weight)


@settings(deadline=None)
@given(st.integers(), st.text(max_size=20))
def test_seeds_fit_torch(seed: int, name: str) -> None:
    assert 0 <= derived_seed(seed, name) < 2**63
    assert derived_seed(seed, name) == derived_seed(seed, name)
    assert derived_seed(seed, name) != derived_seed(seed + 1, name)


def test_an_initializer_takes_the_place_of_reset_parameters() -> None:
    def ones(module: nn.Module) -> None:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.fill_(1)

    model = materialize(on_meta(Layer), device="cpu", seed=1, initializer=ones)
    assert all((t == 1).all() for t in [*model.parameters(), *model.buffers()])


class Replaces(nn.Module):
    """Puts new tensors in the place of its own, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("table", torch.empty(2))

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.table = torch.tensor([3.0, 4.0])


def test_an_initializer_may_replace_tensors() -> None:
    model = on_meta(Replaces)
    materialize(model, device="cpu", seed=1)
    assert model.weight.tolist() == [1, 2]
    assert model.table.tolist() == [3, 4]


class Forgets(Layer):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class Cannot(Layer):
    reset_parameters = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Sequential(Layer(), Forgets()), "the initializer of 1 (Forgets) leaves table unfilled"),
        (lambda: nn.Sequential(Layer(), Cannot()), "1 (Cannot) cannot initialize its values"),
        (Cannot, "the root (Cannot) cannot initialize its values"),
    ],
)
def test_values_that_nobody_makes_are_reported(build: Callable[[], nn.Module], message: str) -> None:
    model = on_meta(build)
    with pytest.raises(pz.PlanError) as caught:
        materialize(model, device="cpu", seed=1)
    assert [(d.code, d.message) for d in caught.value.diagnostics] == [("no-initializer", message)]
    if "cannot" in message:
        assert all(p.is_meta for p in model.parameters())


@pytest.mark.ranks
def test_a_divided_attribute_is_whole_while_values_are_made() -> None:
    expected = materialize(on_meta(Layer), device="cpu", seed=1).weight

    def worker() -> tuple[int, bool]:
        rules = plan('rules:\n  "": {style: shard-params, params: {weight: shard(0)}, divide: [heads]}')
        mesh = pz.build_mesh(Mesh({"tp": 2}), "cpu")
        model = on_meta(Layer)
        pz.materialize(pz.apply(pz.compile(rules, model, mesh), model, mesh), device="cpu", seed=1)
        assert isinstance(model.weight, DTensor)
        return model.heads, torch.equal(model.weight.full_tensor(), expected)

    assert run_ranks(worker, 2) == [(2, True)] * 2


@pytest.mark.ranks
def test_offloaded_parameters_stay_on_the_cpu() -> None:
    """The device `meta` stands in for a GPU."""

    def worker() -> dict[str, str]:
        rules = plan(
            "rules:\n  before: {style: fsdp, cpu_offload: true}\n  inner: {style: fsdp, cpu_offload: true, min_size: 100}\n"
            '  "": fsdp'
        )
        mesh = pz.build_mesh(Mesh({"dp_shard": 2}), "cpu")
        model = on_meta(around(FusedMlp))
        pz.apply(pz.compile(rules, model, mesh), model, mesh)
        allocate(model, "meta")
        return {n: p.device.type for n, p in model.named_parameters()}

    expected = {
        "before.weight": "cpu", "inner.gate_up.weight": "cpu", "inner.gate_up.bias": "meta", "inner.down.weight": "meta",
        "inner.down.bias": "meta", "after.weight": "meta", "after.bias": "meta",
    }  # fmt: skip
    assert {n: d for n, d in run_ranks(worker, 2)[0].items() if expected[n] != d} == {}
