"""A packed dimension: each rank's ordinary shard is its slice of every part."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallelizer.language.plan import shard
from parallelizer.styles.packed_parts import packings as packings_of
from parallelizer.styles.packing import Packing
from parallelizer.styles.target import Target


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
    for rank, local in enumerate(packing.pack(full).chunk(packing.ranks, packing.dim)):
        slices = [
            part.chunk(packing.ranks, packing.dim)[rank] for part in full.split(packing.parts, packing.dim)
        ]
        assert torch.equal(local, torch.cat(slices, packing.dim))


@settings(deadline=None)
@given(packings())
def test_unpacking_undoes_packing(packing: Packing) -> None:
    full = tensor_for(packing)
    assert torch.equal(packing.unpack(packing.pack(full)), full)
    assert torch.equal(packing.pack(packing.unpack(full)), full)


def test_one_rank_packs_nothing() -> None:
    full = torch.arange(6)
    assert torch.equal(Packing(0, (2, 4), 1).pack(full), full)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 3), st.integers(1, 3), st.booleans()
)
def test_parts_by_number_and_by_name_give_the_same_packing(
    heads: list[int], ranks: int, size: int, around: bool
) -> None:
    """Every rank gets whole heads of each part, whoever knows how many there are."""
    heads = [n * ranks for n in heads]
    module, outer = nn.Linear(3, sum(heads) * size), nn.Module()
    (outer if around else module).config = SimpleNamespace(**{f"n{i}": n for i, n in enumerate(heads)})  # type: ignore[assignment]
    found = []
    for parts in (heads, [f"config.n{i}" for i in range(len(heads))]):
        target = Target(module, "m", None, {"packed": parts}, "tp", {"tp": ranks}, (outer,))
        found.append(packings_of(target, {"weight": {"tp": shard(0)}, "bias": {"tp": shard(0)}}))
    assert found[0] == found[1]
    expected = Packing(0, tuple(n * size for n in heads), ranks)
    assert found[0] == ({"weight": expected, "bias": expected} if ranks > 1 else {})
    full = torch.cat([torch.arange(n).repeat_interleave(size) + 100 * i for i, n in enumerate(heads)])
    for rank, local in enumerate(expected.pack(full).chunk(ranks)):
        of_rank = [
            torch.arange(n).chunk(ranks)[rank].repeat_interleave(size) + 100 * i for i, n in enumerate(heads)
        ]
        assert torch.equal(local, torch.cat(of_rank))
