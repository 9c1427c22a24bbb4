"""Orders deal every row out once, put it back where it was, and know what their rows see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Buffer, Plan
from parallelizer.styles.context_parallel.dealing import by_cost, document_mask, order_for, per_document
from parallelizer.styles.context_parallel.order import (
    Contiguous,
    Order,
    order_of,
    padded,
    static_order,
    tagged,
)

HERE = Span("plan.yaml")


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, int, int]:
    """An order, the rows of its sequence and the rows of its batch."""
    ranks, batch = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rows = 2 * ranks * draw(st.integers(1, 9))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    breaks = torch.rand(batch, rows, generator=seed) < draw(st.sampled_from([0.05, 0.3, 0.9]))
    made = {
        "head-tail": lambda: Order(ranks),
        "none": lambda: Contiguous(ranks),
        "per-document": lambda: per_document(breaks.cumsum(1), ranks),
        "by-cost": lambda: by_cost(torch.rand(rows, generator=seed), ranks, chunk=draw(st.integers(1, 9))),
    }
    return made[draw(st.sampled_from(sorted(made)))](), rows, batch


@given(orders())
def test_parts_hold_every_row_once_in_ascending_order_and_join_to_the_whole(
    drawn: tuple[Order, int, int],
) -> None:
    order, rows, batch = drawn
    whole = torch.arange(batch * rows * 2).view(batch, rows, 2)
    parts = [order.split(whole, 1, rank) for rank in range(order.ranks)]
    assert all(part.shape == (batch, rows // order.ranks, 2) for part in parts)
    assert torch.equal(order.join(parts, 1), whole)
    at = torch.stack([order.positions(rows, rank).expand(batch, -1) for rank in range(order.ranks)], 1)
    assert (at.diff(dim=2) > 0).all()
    assert torch.equal(at.flatten(1).sort(1).values, torch.arange(rows).expand(batch, -1))
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.gather(1, at[:, rank].unsqueeze(2).expand(-1, -1, 2)))
        into = torch.empty_like(part, dtype=torch.float64)
        order.split_into(into, whole, 1, rank)
        assert torch.equal(into.long(), part)


@given(st.sampled_from([Order, Contiguous]), st.integers(2, 5), st.integers(1, 6), st.booleans())
def test_blocks_and_pairs_cover_what_a_mask_shows(
    kind: type[Order], ranks: int, chunk: int, is_causal: bool
) -> None:
    order, rows = kind(ranks), 2 * chunk
    whole = rows * ranks
    for rank in range(ranks):
        mine = order.positions(whole, rank).unsqueeze(1)
        shown = (torch.arange(whole) <= mine) if is_causal else torch.ones(rows, whole, dtype=torch.bool)
        covered = torch.zeros(rows, whole, dtype=torch.int64)
        for block in order.blocks(rows, rank, is_causal=is_causal) or ():
            part = covered[block.queries, block.keys]
            part += torch.ones_like(part).tril() if block.is_causal else 1
        assert torch.equal(covered, shown.long())
        met = torch.zeros(rows, whole, dtype=torch.int64)
        for source in range(ranks):
            seen = order.seen(rank, source, rows, rows, is_causal=is_causal)
            if seen is None:
                continue
            part = torch.zeros(rows, rows, dtype=torch.int64)
            part[seen[0], seen[1]] = 1
            if is_causal and source == rank:
                part = part.tril()
            met[:, order.positions(whole, source)] += part
        assert torch.equal(met, shown.long())


@settings(deadline=None)  # the machine may be busy
@given(st.integers(2, 6), st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_per_document_every_rank_sees_about_as_many_keys(ranks: int, sizes: list[int]) -> None:
    rows = sum(sizes)
    sizes.append(-rows % (2 * ranks) + 2 * ranks)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)]).unsqueeze(0)
    order = per_document(ids, ranks)
    work = [int(document_mask(ids, order.positions(ids.size(1), rank)).sum()) for rank in range(ranks)]
    # What 2W divides of a document is even work; its rest, n % 2W rows that see n keys at most, is dealt out as it comes.
    assert max(work) - min(work) <= sum(n % (2 * ranks) * n for n in sizes)
    divisible = [2 * ranks * n for n in sizes]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(divisible)]).unsqueeze(0)
    order = per_document(ids, ranks)
    even = {int(document_mask(ids, order.positions(ids.size(1), rank)).sum()) for rank in range(ranks)}
    assert len(even) == 1  # where every document divides, it is exact


def test_by_cost_deals_the_dearest_chunks_round_and_back() -> None:
    cost = torch.tensor([1.0, 8, 2, 7, 3, 6, 4, 5])
    order = by_cost(cost, 2, chunk=1)
    held = [order.positions(8, rank) for rank in range(2)]
    assert [cost[rows].sum().item() for rows in held] == [18, 18]


def test_padding_is_filled_and_left_out_again() -> None:
    order = Order(2, length=5)
    whole = padded(torch.arange(1, 6).unsqueeze(0), 1, 8, -100)
    assert whole.tolist() == [[1, 2, 3, 4, 5, -100, -100, -100]]
    parts = [order.split(whole, 1, rank) for rank in range(2)]
    assert [order.real(rank, 4) for rank in range(2)] == [2, 3]
    assert order.whole(order.join(parts, 1), 1).tolist() == [[1, 2, 3, 4, 5]]
    assert padded(torch.zeros(1, 2, dtype=torch.bool), 1, 4).tolist() == [[False, False, True, True]]
    assert order.padded_for(8, 4).length is None and order.padded_for(7, 4).length == 7


def test_a_part_knows_its_order_and_a_copy_does_not() -> None:
    order = static_order("none", 2)
    part = tagged(torch.zeros(2), order)
    assert order_of(part) is order and order_of(part.clone()) is None


def test_rows_that_are_dealt_out_one_by_one_need_a_batch_and_their_length() -> None:
    order = per_document(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]), 2)
    with pytest.raises(ValueError, match=r"no dimension 0 of 2 rows.*give the model positions"):
        order.split(torch.zeros(4, 3), 0, 0)
    with pytest.raises(ValueError, match="a sequence of 6 rows, and the batch was dealt out as one of 4"):
        order.split(torch.zeros(2, 6), 1, 0)
    with pytest.raises(ValueError, match="cannot be cut into 4 equal chunks"):
        per_document(torch.zeros(1, 6), 2)


def plan(balance: str, **batch: Buffer) -> Plan:
    return Plan("p", "p.yaml", batch=batch, balanced=balance)


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
MASK = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
DOCUMENTS = Buffer("ids", HERE, 1, documents=True)
ROWS = Buffer("mask", HERE, 2)


@pytest.mark.parametrize(
    ("balance", "batch", "split", "tables", "name"),
    [
        ("auto", {"x": IDS}, {"x": Buffer("x", HERE, 1)}, False, "head-tail"),
        ("none", {"x": IDS}, {"x": Buffer("x", HERE, 1)}, False, "none"),
        ("auto", {"ids": IDS}, {"ids": DOCUMENTS}, False, "per-document"),
        ("auto", {"ids": IDS}, {"ids": DOCUMENTS}, True, "by-cost"),
        ("auto", {"mask": MASK}, {"mask": ROWS}, False, "head-tail"),
        ("by-cost", {"mask": MASK}, {"mask": ROWS}, False, "by-cost"),
        ("head-tail", {"ids": IDS}, {"ids": DOCUMENTS}, False, "head-tail"),
        ("by-cost", {"ids": IDS, "mask": MASK}, {"ids": DOCUMENTS, "mask": ROWS}, False, "by-cost"),
        ("per-document", {"ids": IDS.to("meta")}, {"ids": DOCUMENTS}, False, "head-tail"),
    ],
)  # fmt: skip
def test_auto_goes_by_what_the_batch_has(
    balance: str, batch: dict[str, Tensor], split: dict[str, Buffer], tables: bool, name: str
) -> None:
    written = plan(balance, **split)
    if tables:
        written = Plan(
            "p", "p.yaml", batch=split, buffers={"rope": Buffer("rope", HERE, 0)}, balanced=balance
        )
    order, rows = order_for(batch, split, written, 2)
    assert (order.name, rows, order.length) == (name, 8, None)


def test_an_order_that_has_nothing_to_go_by_says_what_is_wanted() -> None:
    split = {"x": Buffer("x", HERE, 1)}
    with pytest.raises(ValueError, match="an entry with `documents: true` in the batch"):
        order_for({"x": IDS}, split, plan("per-document", **split), 2)
    with pytest.raises(ValueError, match="or a boolean mask in the batch"):
        order_for({"x": IDS}, split, plan("by-cost", **split), 2)


def test_a_length_that_does_not_divide_is_padded_only_where_something_says_with_what() -> None:
    short = {"x": IDS[:, :7]}
    order, rows = order_for(short, {"x": Buffer("x", HERE, 1, pad=0)}, plan("auto"), 2, tp=4)
    assert (order.length, rows) == (7, 8)
    order, rows = order_for(short, {"x": Buffer("x", HERE, 1)}, plan("auto"), 2)
    assert (order.length, rows) == (None, 7)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_a_document_mask_is_that_of_its_definition(ids: list[int]) -> None:
    documents = torch.tensor([ids])
    mask = document_mask(documents, torch.arange(len(ids)))[0, 0]
    for i, row in enumerate(mask.tolist()):
        assert row == [j <= i and ids[j] == ids[i] for j in range(len(ids))]
