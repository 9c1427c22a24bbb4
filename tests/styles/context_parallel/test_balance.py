from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.styles.context_parallel import balance

RANKS = st.integers(1, 8)
LENGTHS = st.integers(1, 5)


def test_order_of_eight_rows_on_two_ranks() -> None:
    assert balance.head_tail(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert balance.local_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert balance.local_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


@given(RANKS, LENGTHS)
def test_order_is_a_permutation_and_its_inverse_undoes_it(ranks: int, length: int) -> None:
    order, inverse = (
        balance.head_tail(2 * ranks * length, ranks),
        balance.head_tail_inverse(2 * ranks * length, ranks),
    )
    assert sorted(order.tolist()) == list(range(2 * ranks * length))
    assert order[inverse].tolist() == inverse[order].tolist() == list(range(2 * ranks * length))


@given(RANKS, LENGTHS, st.integers(-3, 2))
def test_split_takes_the_local_positions_and_unsplit_restores(ranks: int, length: int, dim: int) -> None:
    whole = torch.randn(2, 2, 2).repeat_interleave(ranks * length, dim=dim)
    whole = torch.randn_like(whole)
    parts = [balance.split(whole, dim, ranks, rank) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        positions = balance.local_positions(whole.size(dim), ranks, rank)
        assert torch.equal(part, whole.index_select(dim, positions))
    assert torch.equal(balance.unsplit(torch.cat(parts, dim), dim, ranks), whole)
    assert torch.equal(balance.unsplit_parts(parts, dim), whole) or ranks == 1


def test_split_copies_into_dense_memory() -> None:
    whole = torch.randn(2, 3, 8, 2).to(memory_format=torch.channels_last)
    before = whole.clone()
    part = balance.split(whole, 2, 2, 1)
    assert part.is_contiguous()
    part.zero_()
    assert torch.equal(whole, before)


def test_one_rank_gets_the_tensor_itself_whatever_its_length() -> None:
    whole = torch.randn(7, 3)
    assert balance.split(whole, 0, 1, 0) is whole
    assert balance.unsplit(whole, 0, 1) is whole
    assert balance.head_tail(7, 1).tolist() == list(range(7))


def test_split_is_differentiable() -> None:
    whole = torch.arange(8.0, requires_grad=True)
    (balance.split(whole, 0, 2, 0) * torch.arange(1.0, 5.0)).sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [1, 2, 0, 0, 0, 0, 3, 4]


@given(RANKS, LENGTHS, st.booleans())
def test_blocks_cover_what_each_row_may_see_exactly_once(ranks: int, length: int, is_causal: bool) -> None:
    seq_len = 2 * ranks * length
    positions = torch.arange(seq_len)
    for rank in range(ranks):
        rows = balance.local_positions(seq_len, ranks, rank)
        seen = torch.zeros(len(rows), seq_len, dtype=torch.int64)
        for block in balance.blocks(len(rows), ranks, rank, is_causal=is_causal):
            part = torch.ones_like(seen[block.queries, block.keys])
            if block.is_causal:
                assert part.size(0) == part.size(1)
                part = part.tril()
            seen[block.queries, block.keys] += part
        allowed = positions.unsqueeze(0) <= rows.unsqueeze(1) if is_causal else torch.ones_like(seen).bool()
        assert torch.equal(seen, allowed.long())


@given(st.integers(2, 8), LENGTHS)
def test_causal_work_is_the_same_on_every_rank(ranks: int, length: int) -> None:
    def scores(rank: int) -> tuple[int, int]:
        work = balance.blocks(2 * length, ranks, rank, is_causal=True)
        full = [b for b in work if not b.is_causal]
        return sum(b.keys.stop - b.keys.start for b in full), len(work) - len(full)

    assert {scores(rank) for rank in range(ranks)} == {((2 * ranks - 1) * length, 2)}


@pytest.mark.parametrize("seq_len", [2, 6, 9, 13])
def test_a_length_that_does_not_divide_is_refused(seq_len: int) -> None:
    for call in (
        lambda: balance.head_tail(seq_len, 2),
        lambda: balance.head_tail_inverse(seq_len, 2),
        lambda: balance.local_positions(seq_len, 2, 0),
        lambda: balance.split(torch.zeros(seq_len), 0, 2, 0),
        lambda: balance.unsplit(torch.zeros(seq_len), 0, 2),
    ):
        with pytest.raises(ValueError, match=f"{seq_len} rows cannot be cut into 4 equal chunks"):
            call()


def test_an_odd_number_of_local_rows_is_refused() -> None:
    for is_causal in (True, False):
        with pytest.raises(ValueError, match="cannot be cut"):
            balance.blocks(5, 2, 0, is_causal=is_causal)


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_is_refused(ranks: int, rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        balance.split(torch.zeros(8), 0, ranks, rank)
