"""A packed dimension: each rank's ordinary shard is its slice of every part."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.styles.packing import Packing


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    ranks = draw(st.integers(1, 4))
    parts = draw(st.lists(st.integers(1, 4).map(lambda n: n * ranks), min_size=1, max_size=4))
    return Packing(draw(st.integers(0, 1)), tuple(parts), ranks)


def tensor_for(packing: Packing) -> torch.Tensor:
    shape = [3, 3]
    shape[packing.dim] = sum(packing.parts)
    return torch.arange(shape[0] * shape[1]).reshape(shape)


@settings(deadline=None)
@given(packings())
def test_a_shard_holds_its_slice_of_every_part(packing: Packing) -> None:
    full = tensor_for(packing)
    for rank, shard in enumerate(packing.pack(full).chunk(packing.ranks, packing.dim)):
        slices = [
            part.chunk(packing.ranks, packing.dim)[rank] for part in full.split(packing.parts, packing.dim)
        ]
        assert torch.equal(shard, torch.cat(slices, packing.dim))


@settings(deadline=None)
@given(packings())
def test_unpacking_undoes_packing(packing: Packing) -> None:
    full = tensor_for(packing)
    assert torch.equal(packing.unpack(packing.pack(full)), full)
    assert torch.equal(packing.pack(packing.unpack(full)), full)


def test_one_rank_packs_nothing() -> None:
    full = torch.arange(6)
    assert torch.equal(Packing(0, (2, 4), 1).pack(full), full)
