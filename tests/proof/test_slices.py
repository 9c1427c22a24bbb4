"""Which parts of a whole tensor count as right on a rank."""

from __future__ import annotations

import torch

from parallelizer.language.plan import Mesh
from parallelizer.proof.slices import holds, line, partial_axis, separating_axis, wrong_ranks
from parallelizer.styles.context_parallel import balance
from parallelizer.styles.packing import Packing

MESH = Mesh({"dp_shard": 2, "cp": 2, "tp": 2})
WHOLE = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BOUND = 1e-12


def part(rank: int, tp_dim: int | None) -> torch.Tensor:
    where = MESH.coordinate(rank)
    rows = balance.split(WHOLE.chunk(2, 0)[where["dp_shard"]], 1, 2, where["cp"])
    return rows if tp_dim is None else rows.chunk(2, tp_dim)[where["tp"]]


def test_a_rank_may_hold_its_rows_its_tokens_and_a_chunk_of_any_dimension() -> None:
    for rank in range(8):
        for dim in (None, 1, 2):
            assert holds(WHOLE, part(rank, dim), MESH, rank, BOUND)


def test_what_is_only_rounding_is_right_in_relation_to_the_whole() -> None:
    nothing = torch.zeros_like(WHOLE)
    assert not holds(nothing, nothing + 1e-18, Mesh({"tp": 2}), 0, BOUND)
    assert holds(nothing, nothing + 1e-18, Mesh({"tp": 2}), 0, BOUND, least=1.0)
    assert not holds(nothing, nothing + 1e-9, Mesh({"tp": 2}), 0, BOUND, least=1.0)


def test_another_ranks_part_is_wrong() -> None:
    for rank in range(8):
        for other in range(8):
            assert holds(WHOLE, part(other, 2), MESH, rank, BOUND) == (rank == other)


def test_a_contiguous_half_of_the_sequence_is_no_part() -> None:
    assert not holds(WHOLE, WHOLE.chunk(2, 1)[0], Mesh({"cp": 2}), 0, BOUND)


def test_a_packed_dimension_is_split_part_by_part() -> None:
    mesh, whole = Mesh({"tp": 2}), WHOLE[..., :4]
    packing = Packing(2, (2, 2), 2)
    assert holds(whole, whole[..., [0, 2]], mesh, 0, BOUND, packing)
    assert not holds(whole, whole[..., [0, 1]], mesh, 0, BOUND, packing)


def test_wrong_ranks_and_the_axis_that_separates_them() -> None:
    mine = [part(r, 2) for r in range(8)]
    for rank in (1, 3, 5, 7):
        mine[rank] = mine[rank] + 1
    assert wrong_ranks(WHOLE, mine, MESH, BOUND) == [1, 3, 5, 7]
    assert separating_axis([1, 3, 5, 7], MESH) == "tp"
    assert separating_axis(range(8), MESH) is None


def test_tensors_that_sum_to_the_right_one_over_an_axis() -> None:
    mine = [part(r, None) * (0.25 if MESH.coordinate(r)["tp"] else 0.75) for r in range(8)]
    assert partial_axis(WHOLE, mine, MESH, BOUND) == "tp"
    assert line(MESH, 5, "tp") == [4, 5]
