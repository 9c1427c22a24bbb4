"""The rows of parameters hold every parameter once, and all ranks together hold the model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.report.rows.parameters import (
    mesh_axes,
    parameter_rows,
    parameter_total,
    shape,
    sharding_axes,
    uses_by_name,
)
from tests.report.rows.plans import compiled


@pytest.mark.parametrize("preset", ["tp8_cp2", "fsdp2_tp2", "hsdp2x2", "single"])
def test_every_parameter_is_in_one_row_with_its_bytes(preset: str) -> None:
    program, model = compiled(f"parallel={preset}")
    shards = parameter_shards(program, model)
    rows = parameter_rows(shards, apart=lambda shard: shard.styles)
    names = [name for row in rows for name in row.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for row in rows:
        for name in row.names:
            assert tuple(model.get_parameter(name).shape) == row.shard.global_shape
    assert sum(row.bytes for row in rows) == parameter_total(shards).bytes


@pytest.mark.parametrize(("preset", "copies"), [("fsdp2", 1), ("fsdp4", 1), ("hsdp2x2", 2)])
def test_what_all_ranks_hold_is_the_model(preset: str, copies: int) -> None:
    """Under fsdp alone nothing is whole on two ranks; replicas hold it as often as there are of them."""
    program, model = compiled(f"parallel={preset}")
    whole = sum(p.numel() for p in model.parameters())
    totals = [
        parameter_total(parameter_shards(program, model, rank)) for rank in range(program.mesh.world_size)
    ]
    assert {total.whole for total in totals} == {whole}
    assert sum(total.held for total in totals) == copies * whole
    assert sum(total.bytes for total in totals) == copies * 4 * whole


def test_the_shards_of_a_row_are_parts_of_the_whole() -> None:
    program, model = compiled("parallel=tp8_cp2")
    for row in parameter_rows(parameter_shards(program, model)):
        over = [axis for axis, placement in row.shard.placements.items() if placement != "replicate"]
        ranks = math.prod(program.mesh.sizes[axis] for axis in over)
        assert math.prod(row.shard.local_shape) * ranks == math.prod(row.shard.global_shape)


def test_rows_part_where_a_table_tells_them_apart() -> None:
    program, model = compiled("parallel=tp2")
    one = parameter_shards(program, model)[0]
    shards = [one, replace(one, name="other", styles=("another",)), replace(one, name="whole", reason="tiny")]
    assert [row.names for row in parameter_rows(shards)] == [(one.name, "other"), ("whole",)]
    told = parameter_rows(shards, apart=lambda shard: shard.styles)
    assert [row.names for row in told] == [(one.name,), ("other",), ("whole",)]


def test_the_styles_that_place_a_parameter_come_with_their_rules() -> None:
    program, _ = compiled("parallel=fsdp2_tp2")
    (colwise, at), (fsdp, _) = uses_by_name(program)["layers.0.attention.wq.weight"]
    assert (colwise, fsdp) == ("colwise", "fsdp")
    [rule] = [r for r in program.plan.rules if r.span == at]
    assert rule.key == "layers.*.attention.w[qkv]"


def test_axes_that_shard_nothing_are_known() -> None:
    program, model = compiled("parallel=hsdp2x2")
    shards = parameter_shards(program, model)
    assert mesh_axes(shards) == ["dp_replicate", "dp_shard"] and sharding_axes(shards) == ["dp_shard"]
    assert mesh_axes([]) == sharding_axes([]) == []


def test_shapes() -> None:
    assert (shape((256, 64)), shape((256, 64), " by "), shape(())) == ("256x64", "256 by 64", "scalar")
