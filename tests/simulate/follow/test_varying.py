"""Over which axes values vary, operator by operator, in a fake world of four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from parallelizer.child.children import in_children
from parallelizer.language.plan import Mesh
from parallelizer.mesh import build_mesh
from parallelizer.simulate.collectives import axes_by_ranks
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.follow.varying import Varying
from parallelizer.torch_private import FakeTensors

Case = Callable[[DeviceMesh, Varying], torch.Tensor]


def whole(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.ones(8, 4), mesh["tp"], [Replicate()], run_check=False)


def part(mesh: DeviceMesh) -> DTensor:
    return whole(mesh).redistribute(placements=[Shard(0)])


def plain(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return torch.ones(3) + 1


def cut(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return part(mesh).to_local()


def strided(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return part(mesh).view(2, 4, 4).transpose(0, 1).flatten(0, 1).to_local()


def gathered(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return part(mesh).redistribute(placements=[Replicate()]).to_local()


def computed(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return torch.ones(4) * part(mesh).to_local().sum(0)


def shape_only(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return torch.ones_like(part(mesh).to_local())


def overwritten(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return part(mesh).to_local().clone().zero_()


def written_through_a_view(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    buffer = torch.zeros(6, 4)
    buffer[2:6].copy_(part(mesh).to_local())
    return buffer


def summed_terms(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    local = part(mesh).to_local()
    return DTensor.from_local(local, mesh["tp"], [Partial()], run_check=False).full_tensor()


def largest(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    value = torch.ones(2)
    terms = DTensor.from_local(value, mesh["tp"], [Partial("max")], run_check=False)
    return terms.full_tensor()


def summed_copies(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return DTensor.from_local(torch.ones(2), mesh["tp"], [Partial()], run_check=False).full_tensor()


def copies_summed_into_shards(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    terms = DTensor.from_local(torch.ones(8, 4), mesh["tp"], [Partial()], run_check=False)
    return terms.redistribute(placements=[Shard(0)]).to_local()


def from_rows_to_columns(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return part(mesh).redistribute(placements=[Shard(1)]).to_local()


def over_an_axis_that_nobody_watches(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    return DTensor.from_local(torch.ones(2), mesh["dp_shard"], [Partial()], run_check=False).full_tensor()


def in_backward(mesh: DeviceMesh, varying: Varying) -> torch.Tensor:
    weight = torch.ones(4, requires_grad=True)
    (part(mesh).to_local() * weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


def of_one(case: Case) -> tuple[dict[str, str], list[str]]:
    enter_fake_world(4, 0)
    mesh, summed = build_mesh(Mesh({"dp_shard": 2, "tp": 2}), "cpu"), []
    axes = {ranks: axis for ranks, axis in axes_by_ranks(mesh).items() if axis == "tp"}
    varying = Varying(axes, lambda: "here", summed.append)
    with FakeTensors(), varying:
        result = case(mesh, varying)
    return dict(varying.tags(result)), summed


@pytest.mark.parametrize(
    ("case", "varies", "sums"),
    [
        (plain, False, 0),
        (cut, True, 0),
        (strided, True, 0),
        (gathered, False, 0),
        (computed, True, 0),
        (shape_only, False, 0),
        (overwritten, False, 0),
        (written_through_a_view, True, 0),
        (summed_terms, False, 0),
        (largest, False, 0),
        (summed_copies, False, 1),
        (copies_summed_into_shards, True, 1),
        (from_rows_to_columns, True, 0),
        (over_an_axis_that_nobody_watches, False, 0),
        (in_backward, True, 0),
    ],
)
def test_a_value_varies_over_tp(case: Any, varies: bool, sums: int) -> None:
    ((tags, summed),) = in_children([(of_one, case)])
    assert tags == ({"tp": "here"} if varies else {})
    assert summed == ["tp"] * sums
    assert not dist.is_initialized()
