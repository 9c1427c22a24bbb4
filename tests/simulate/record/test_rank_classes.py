"""Classes of ranks by arithmetic, against every rank looked at by itself."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.rank_classes import rank_classes
from parallelizer.styles.application import Program
from tests.findings import compiled, on_meta
from tests.simulate.setups import llama, setup_of, stack, traced


class Odd(nn.Module):
    """Parameters of sizes that few numbers of ranks divide."""

    def __init__(self, sizes: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(features, size) for size in sizes)
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], -1)


def program_of(model: nn.Module, mesh: Mesh, *rules: str) -> Program:
    return compiled(
        "\n".join(("version: 1", "rules:", *(f"  {rule}" for rule in rules))), lambda: model, mesh, force=True
    )


def told_apart(program: Program, model: nn.Module) -> list[tuple[int, int, int]]:
    return [(c.rank, c.ranks, c.parameters_bytes) for c in rank_classes(program, model)]


def numbered(program: Program, model: nn.Module) -> list[tuple[int, int]]:
    return [(c.rank, c.ranks) for c in rank_classes(program, model)]


def one_by_one(program: Program, model: nn.Module) -> list[tuple[int, int, int]]:
    """The smallest rank, the number of ranks and the bytes of each class, from the shards of every rank."""
    split = {axis for a in program.of_slot("attention") for axis in a.axes}
    classes: dict[object, list[int]] = {}
    held: dict[int, int] = {}
    for rank in range(program.mesh.world_size):
        shards = parameter_shards(program, model, rank)
        shapes, held[rank] = tuple(s.local_shape for s in shards), sum(s.bytes for s in shards)
        where = program.mesh.coordinate(rank)
        classes.setdefault((shapes, tuple(where[a] for a in sorted(split))), []).append(rank)
    return sorted((min(ranks), len(ranks), held[ranks[0]]) for ranks in classes.values())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9).map(lambda n: 4 * n), min_size=1, max_size=3),
    mesh=st.fixed_dictionaries(
        {a: st.integers(1, 3) for a in ("dp_replicate", "dp_shard", "cp")}
        | {"tp": st.sampled_from([1, 2, 4])}
    ),
    context=st.booleans(),
)
def test_the_classes_are_those_of_every_rank_looked_at(
    sizes: list[int], mesh: dict[str, int], context: bool
) -> None:
    model = on_meta(lambda: Odd(tuple(sizes), 4))
    rules = ["linears.*: colwise", '"": fsdp', *(["inner: context-parallel"] if context else [])]
    program = program_of(model, Mesh(mesh), *rules)
    assert told_apart(program, model) == one_by_one(program, model)


def chunk(shape: tuple[int, ...], dim: int, ranks: int, index: int) -> tuple[int, ...]:
    """What torch itself gives to one of `ranks`."""
    chunks = torch.empty(shape, device="meta").chunk(ranks, dim)
    return tuple(chunks[index].shape) if index < len(chunks) else (*shape[:dim], 0, *shape[dim + 1 :])


class Widths(nn.Module):
    """A column-wise and a row-wise linear, and one that only FSDP takes; nothing has to divide."""

    def __init__(self, features: int, inner: int, outer: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, inner), nn.Linear(inner, features, bias=False)
        self.head, self.inner = nn.Linear(features, outer, bias=False), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x)))


@settings(max_examples=60, deadline=None)
@given(
    features=st.integers(1, 12),
    inner=st.integers(1, 20),
    outer=st.integers(1, 40),
    replicate=st.integers(1, 2),
    shard=st.integers(1, 20),
    cp=st.integers(1, 3),
    tp=st.integers(1, 4),
    context=st.booleans(),
)
def test_the_classes_are_those_of_torchs_own_chunks(
    features: int, inner: int, outer: int, replicate: int, shard: int, cp: int, tp: int, context: bool
) -> None:
    inner *= tp  # what tp shards divides, as `validate` asks for
    model = on_meta(lambda: Widths(features, inner, outer))
    mesh = Mesh({"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp})
    rules = ["up: colwise", "down: rowwise", '"": fsdp', *(["inner: context-parallel"] if context else [])]
    program = program_of(model, mesh, *rules)
    by_tensor = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    classes: dict[object, list[int]] = {}
    # Neighbouring ranks differ in tp, then in cp, then in dp_shard.
    for rank, (_, d, c, t) in enumerate(itertools.product(*map(range, (replicate, shard, cp, tp)))):
        shapes = []
        for name, param in model.named_parameters():
            shape = tuple(param.shape)
            if name in by_tensor:
                shape = chunk(shape, by_tensor[name], tp, t)
            shapes.append(chunk(shape, 0, shard * cp, d * cp + c))
        # Ranks of cp compute other blocks of the attention matrix, where there is attention.
        part = c if program.of_slot("attention") else 0
        classes.setdefault((tuple(shapes), part), []).append(rank)
    assert numbered(program, model) == sorted((min(ranks), len(ranks)) for ranks in classes.values())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp_shard": 3, "tp": 2}, {"dp_replicate": 2, "dp_shard": 5}, {"cp": 3}])
def test_ranks_of_one_class_have_one_trace(mesh: dict[str, int]) -> None:
    sizes = [f"parallel.mesh.{axis}={size}" for axis, size in mesh.items()]
    make = llama if "cp" in mesh else stack
    setup = make(
        *sizes,
        f"train.batch_size={4 * mesh.get('dp_replicate', 1) * mesh.get('dp_shard', 1)}",
        "train.seq_len=48",
    )
    model = setup.build_model()
    classes = numbered(setup.compile(model), model)
    traces = [traced(setup, rank) for rank in range(setup.mesh.world_size)]
    seen: list[list[int]] = []
    for rank, one in enumerate(traces):
        for ranks in seen:
            first = traces[ranks[0]]
            if (first.ledger, first.memory) == (one.ledger, one.memory):
                ranks.append(rank)
                break
        else:
            seen.append([rank])
    assert sorted((ranks[0], len(ranks)) for ranks in seen) == classes


def test_ranks_without_rows_are_a_class_of_their_own() -> None:
    model = on_meta(lambda: Odd((5,), 3))
    program = program_of(model, Mesh({"dp_shard": 8}), '"": fsdp')
    # Rows go one to a rank: the first five have weight and bias, the others nothing.
    assert told_apart(program, model) == [(0, 5, 4 * (3 + 1)), (5, 3, 0)]


def test_one_rank_is_one_class() -> None:
    model = on_meta(lambda: Odd((4,), 4))
    assert told_apart(program_of(model, Mesh({}), '"": fsdp'), model) == [(0, 1, 4 * (4 * 4 + 4))]


@pytest.mark.parametrize("preset", ["fsdp2_cp2_tp2", "hsdp2x2", "tp8_cp2"])
def test_the_shipped_presets_have_a_class_for_each_part_of_the_sequence(preset: str) -> None:
    setup = setup_of(f"parallel={preset}")
    model = setup.build_model()
    program = setup.compile(model)
    assert told_apart(program, model) == one_by_one(program, model)
    assert len(rank_classes(program, model)) == setup.mesh.sizes["cp"]
    assert len(rank_classes(program, model, causal=False)) == 1


def test_405b_on_16384_ranks_takes_no_time() -> None:
    setup = setup_of(
        "model=llama3_405b", "parallel=fsdp1024_cp2_tp8", "train.seq_len=8192", "train.batch_size=1024"
    )
    model = setup.build_model()
    program = setup.compile(model)
    begin = time.process_time()
    classes = rank_classes(program, model)
    assert time.process_time() - begin < 0.5
    assert sum(c.ranks for c in classes) == 16_384
    assert [c.rank for c in classes][:2] == [0, 8]  # the two halves of a sequence
