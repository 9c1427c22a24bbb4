"""Which indices a rank holds: of all ranks together every one, and each rank's as torch cuts them."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelizer.runtime.held_indices import IndexRun, Share, holders, original_shape, share
from parallelizer.styles.packing import Packing


class Mesh:
    """As much of a DeviceMesh as a share looks at: rank 0 to n - 1 in order, seen from one of them."""

    def __init__(self, sizes: dict[str, int], rank: int) -> None:
        self.mesh_dim_names = tuple(sizes)
        self.mesh = torch.arange(torch.Size(sizes.values()).numel()).view(*sizes.values())
        self.rank = rank

    def size(self, dim: int) -> int:
        return int(self.mesh.shape[dim])

    def get_coordinate(self) -> list[int]:
        return (self.mesh == self.rank).nonzero()[0].tolist()


class Lying(torch.Tensor):
    """A tensor on meta with a DTensor's placements."""

    device_mesh: Any
    placements: Any


@pytest.fixture(autouse=True)
def _dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallelizer.runtime.held_indices.DTensor", Lying)


def lying(shape: tuple[int, ...], mesh: Mesh, placements: list[Any]) -> DTensor:
    tensor = torch.empty(shape, device="meta").as_subclass(Lying)
    tensor.device_mesh, tensor.placements = mesh, tuple(placements)
    return cast(DTensor, tensor)


def chunked(full: torch.Tensor, mesh: Mesh, placements: list[Any]) -> torch.Tensor:
    """A rank's part by torch's own cut: tensor axes first, then the data axes, each in the mesh's order."""
    names = mesh.mesh_dim_names
    for axis in ("tp", *(name for name in names if name != "tp")):
        at = names.index(axis)
        if isinstance(placement := placements[at], Shard):
            chunks, index = full.chunk(mesh.size(at), placement.dim), mesh.get_coordinate()[at]
            full = chunks[index] if index < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


SIZES = st.fixed_dictionaries(
    {"dp_replicate": st.integers(1, 2), "dp_shard": st.integers(1, 3), "tp": st.integers(1, 3)}
)


@settings(deadline=None)
@given(st.data(), SIZES)
def test_shares_are_torchs_slices_and_make_up_the_tensor(data: st.DataObject, sizes: dict[str, int]) -> None:
    parts, tp = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), sizes["tp"]
    packing = Packing(0, tuple(p * tp for p in parts), tp) if data.draw(st.booleans()) else None
    rows = sum(parts) * tp if packing else data.draw(st.integers(1, 8))
    full = torch.arange(rows * 5).view(rows, 5)
    dim = 0 if packing else data.draw(st.integers(0, 1))
    placements = [Replicate(), Shard(data.draw(st.integers(0, 1))), Shard(dim)]
    seen = torch.zeros_like(full)
    ranks = torch.Size(sizes.values()).numel()
    writers = holders(lying((rows, 5), Mesh(sizes, 0), placements), 0)
    for rank in range(ranks):
        param = lying((rows, 5), Mesh(sizes, rank), placements)
        own = share(param, packing)
        assert own == share(lying((rows, 5), Mesh(sizes, 0), placements), packing, rank)
        stored = packing.pack(full) if packing else full
        wanted = chunked(stored, Mesh(sizes, rank), placements)
        local = torch.full(own.shape, -1)
        for runs, here, _ in own.boxes():
            box = tuple(slice(r.original, r.original + r.count) for r in runs)
            local[here] = full[box]
            seen[box] += rank in writers
        assert local.shape == wanted.shape and torch.equal(local, wanted)
        assert holders(param, 0) == writers
    assert (seen == 1).all()
    assert original_shape(lying((rows, 5), Mesh(sizes, 0), placements), packing) == (rows, 5)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 9), st.data())
def test_what_lies_within_a_box_is_put_side_by_side(start: int, count: int, data: st.DataObject) -> None:
    packing = Packing(0, (4, 8, 4), 2)
    param = lying((16, 3), Mesh({"tp": 2}, 1), [Shard(0)])
    own, full = share(param, packing), torch.arange(48).view(16, 3)
    local = packing.pack(full)[8:]
    cut = own.within([(start, count), (1, 2)])
    taken = torch.full(cut.shape, -1)
    inside = torch.zeros(16, 3, dtype=torch.bool)
    inside[start : start + count, 1:3] = True
    for runs, here, beside in cut.boxes():
        taken[beside] = local[here]
        assert torch.equal(local[here], full[tuple(slice(r.original, r.original + r.count) for r in runs)])
    assert sorted(taken.flatten().tolist()) == sorted(
        set(local.flatten().tolist()) & set(full[inside].tolist())
    )


def test_a_mesh_without_the_writer_gives_nothing() -> None:
    mesh = Mesh({"tp": 2}, 1)
    mesh.mesh = torch.tensor([1, 3])
    assert holders(lying((4,), mesh, [Shard(0)]), 0) == []


def test_a_scalar_is_one_box() -> None:
    own = share(torch.ones(()), None)
    assert own == Share(()) and [b[1] for b in own.boxes()] == [()]
    assert list(itertools.chain(*share(torch.ones(2, 0), None).runs)) == [IndexRun(0, 0, 2)]
