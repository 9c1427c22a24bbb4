"""Classes of ranks by arithmetic, against every rank looked at by itself."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallelizer.plan import Mesh
from parallelizer.program import Program
from parallelizer.shards import parameter_shards
from parallelizer.simulate.classes import rank_classes
from tests.findings import compiled, on_meta
from tests.simulate.setups import setup_of


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
    begin = time.perf_counter()
    classes = rank_classes(program, model)
    assert time.perf_counter() - begin < 0.5
    assert sum(c.ranks for c in classes) == 16_384
    assert [c.rank for c in classes][:2] == [0, 8]  # the two halves of a sequence
