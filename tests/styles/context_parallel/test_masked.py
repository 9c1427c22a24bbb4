"""Masks tile by tile: everything that is shown is computed, and little of what is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.simulate.rehearse.host_reads import host_reads
from parallelizer.styles.context_parallel import masked
from parallelizer.styles.context_parallel.dealing import by_cost, document_mask, per_document
from parallelizer.styles.context_parallel.masked import attend, tiles
from parallelizer.styles.context_parallel.order import Contiguous, Order, padded
from tests.styles.context_parallel.reference import masked_attention, plain_attention, relative_error


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    before = masked.STEP, masked.TILE
    masked.STEP, masked.TILE = 2, 4
    yield
    masked.STEP, masked.TILE = before


@given(
    st.integers(1, 3),
    st.integers(1, 13),
    st.integers(1, 11),
    st.integers(0, 999),
    st.sampled_from([0.02, 0.3, 0.98]),
)
def test_tiles_hold_all_that_any_row_sees_and_every_row_once(
    batch: int, rows: int, columns: int, seed: int, share: float
) -> None:
    mask = torch.rand(batch, 2, rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    covered = torch.zeros(batch, 1, rows, columns, dtype=torch.int64)
    held = torch.zeros(batch, rows, dtype=torch.int64)
    for tile in tiles(mask, batch, rows):
        covered[tile.batch, :, tile.rows, tile.keys] += 1
        held[tile.batch, tile.rows] += 1
        assert not tile.every or mask[tile.batch, :, tile.rows, tile.keys].all()
    assert (held == 1).all() and covered.max() <= 1
    assert (covered.bool() | ~mask).all()


def test_documents_cost_what_they_show() -> None:
    ids = torch.arange(64) // 16
    mask = ((ids.unsqueeze(1) == ids) & (torch.arange(64).unsqueeze(1) >= torch.arange(64))).view(
        1, 1, 64, 64
    )
    computed = sum(4 * (tile.keys.stop - tile.keys.start) for tile in tiles(mask, 1, 64))
    assert computed <= 4 * 16 * (4 + 8 + 12 + 16) / 4 < 64 * 64 / 4 * 1.01


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_outputs_and_gradients_are_those_of_the_definition(added: bool, heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (
        torch.randn(2, n, rows, size, dtype=torch.float64, generator=generator).requires_grad_()
        for n, rows, size in ((4, 11, 8), (2, 9, 8), (2, 9, 6))
    )
    mask = torch.rand(2, heads, 11, 9, generator=generator) < 0.4
    mask[..., 0] = True
    if added:
        mask = torch.rand(2, heads, 11, 9, dtype=torch.float64, generator=generator).masked_fill(
            ~mask, -torch.inf
        )
    out = attend(q, k, v, mask=mask, is_causal=False, scale=0.3)
    right = masked_attention(q, k, v, mask=mask, is_causal=False, scale=0.3)
    grad = torch.randn(right.shape, dtype=torch.float64, generator=generator)
    assert relative_error(out.detach(), right.detach()) < 1e-14
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(right, (q, k, v), grad), strict=True
    ):
        assert relative_error(a, b) < 1e-14


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_without_a_mask_is_right_with_grouped_heads_and_without(causal: bool, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)
    q, k, v = (
        torch.randn(2, heads, 12, 8, generator=generator, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    )
    grad = torch.randn(2, 4, 12, 8, generator=generator)
    out = attend(q, k, v, mask=None, is_causal=causal, scale=0.3)
    right, _ = plain_attention(q, k, v, is_causal=causal, scale=0.3)
    assert relative_error(out.detach(), right.detach()) < 1e-6
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(right, (q, k, v), grad), strict=True
    ):
        assert relative_error(a, b) < 1e-6


def test_a_row_that_sees_nothing_has_no_output_and_gives_no_gradient() -> None:
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., 2, :] = False
    out = attend(q, k, v, mask=mask, is_causal=False, scale=1.0)
    assert (out[0, 0, 2] == 0).all()
    out.sum().backward()
    assert q.grad is not None and k.grad is not None
    assert (q.grad[0, 0, 2] == 0).all() and k.grad.isfinite().all()


def test_one_tile_that_leaves_out_the_last_keys() -> None:
    q, k, v = (torch.randn(1, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False], [True, False]]).view(1, 1, 2, 2)
    out = attend(q, k, v, mask=mask, is_causal=False, scale=1.0)
    assert torch.allclose(out, v[:, :, :1].expand_as(out))
    out.sum().backward()
    assert v.grad is not None and v.grad[0, 0].tolist() == [[2.0] * 4, [0.0] * 4]


@settings(deadline=None)  # the machine may be busy
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 17), min_size=1, max_size=6),
    st.integers(0, 999),
    st.booleans(),
)
def test_every_ranks_rows_of_random_documents_and_masks_are_those_of_the_whole(
    ranks: int, sizes: list[int], seed: int, random: bool
) -> None:
    real = sum(sizes)
    rows = -(-real // (2 * ranks)) * 2 * ranks
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)]).unsqueeze(0)
    whole = document_mask(ids, torch.arange(real))
    if random:
        whole = (torch.rand(1, 2, real, real, generator=generator) < 0.3).logical_or_(torch.eye(real).bool())
    q, k, v = (torch.randn(1, n, rows, 4, dtype=torch.float64, generator=generator) for n in (2, 1, 1))
    keys, values = k[:, :, :real], v[:, :, :real]
    right = masked_attention(q[:, :, :real], keys, values, mask=whole, is_causal=False, scale=0.5)
    cost = padded(whole, 2, rows).sum((0, 1, 3))
    for order in (
        Order(ranks, real), Contiguous(ranks, real), per_document(padded(ids, 1, rows), ranks, real),
        by_cost(cost, ranks, real),
    ):  # fmt: skip
        parts = [
            attend(
                order.split(q, 2, rank), keys, values, is_causal=False, scale=0.5,
                mask=order.split(padded(whole, 2, rows), 2, rank),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        found = order.whole(order.join(parts, 2), 2)
        assert relative_error(found, right) < 1e-13


def test_what_is_remembered_with_a_mask_is_for_its_values_and_the_batch() -> None:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    for batch in (1, 3):
        q, k, v = (torch.randn(batch, 1, 8, 4, dtype=torch.float64) for _ in range(3))
        out = attend(q, k, v, mask=mask, is_causal=False, scale=1.0)
        assert relative_error(out, masked_attention(q, k, v, mask=mask, is_causal=False, scale=1.0)) < 1e-14
    mask[..., 0] = False
    mask[..., 0, 1] = True
    out = attend(q, k, v, mask=mask, is_causal=False, scale=1.0)
    assert relative_error(out, masked_attention(q, k, v, mask=mask, is_causal=False, scale=1.0)) < 1e-14
    with torch.inference_mode():
        again = attend(q, k, v, mask=mask.clone(), is_causal=False, scale=1.0)
    assert relative_error(again, out) < 1e-14


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("added", [False, True])
def test_the_host_reads_a_mask_once(heads: int, added: bool) -> None:
    mask = torch.ones(3, heads, 37, 41, dtype=torch.bool).tril()
    mask[1, :, 20:, :15] = False
    if added:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    reads = host_reads(lambda: tiles(mask, 3, 37), "cpu")
    assert sum(reads.values()) == 1
    assert not host_reads(lambda: tiles(mask, 3, 37), "cpu")  # as the next layer asks
