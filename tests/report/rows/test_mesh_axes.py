"""The rows of axes agree with the mesh's own coordinates."""

from __future__ import annotations

import itertools

import pytest

from parallelizer.language.plan import AXES, Mesh
from parallelizer.report.rows.mesh_axes import axis_rows, group_of, rank_at, sent_over
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.trace import Trace
from tests.report.rows.plans import collective

MESH = Mesh({"dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 4})


def test_axes_of_size_one_have_no_row_and_folded_ones_come_last() -> None:
    assert [(row.name, row.size, row.stride) for row in axis_rows(MESH)] == [
        ("dp_replicate", 2, 24),
        ("dp_shard", 3, 8),
        ("cp", 2, 4),
        ("tp", 4, 1),
        ("dp_shard+cp", 6, 4),
    ]
    assert axis_rows(Mesh({})) == []


@pytest.mark.parametrize("rank", [0, 17, 47])
def test_a_group_is_the_ranks_that_differ_on_its_axes_alone(rank: int) -> None:
    own = MESH.coordinate(rank)
    for row in axis_rows(MESH):
        alike = [
            other
            for other in range(MESH.world_size)
            if all(MESH.coordinate(other)[a] == own[a] for a in AXES if a not in row.axes)
        ]
        group = group_of(MESH, row.axes, rank)
        assert group == alike and len(group) == row.size and rank in group
        assert {b - a for a, b in itertools.pairwise(group)} == {row.stride}


def test_a_coordinate_has_one_rank() -> None:
    for rank in range(MESH.world_size):
        assert rank_at(MESH, [MESH.coordinate(rank)[axis] for axis in AXES]) == rank


def test_what_is_sent_over_an_axis() -> None:
    ledger = (collective(payload=8), collective(payload=20), collective(axis="cp", payload=2))
    step = Trace(0, ledger, Usage(0, "", "", {}))
    assert [sent_over(step, axis) for axis in ("tp", "cp", "dp_shard")] == [14, 1, 0]
