"""The calls that packed documents come to: together they see what the mask shows, and no call has more keys than the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer import torch_private
from parallelizer.styles.context_parallel.dealing import document_mask, per_document
from parallelizer.styles.context_parallel.order import Contiguous, Order, padded
from parallelizer.styles.context_parallel.runs import KernelCall, are_packed, calls_of

Tensor = torch.Tensor
CPU = torch.device("cpu")
SIZES = st.lists(st.integers(1, 17), min_size=1, max_size=6)


def documents(*sizes: int) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)]).unsqueeze(0)


def shown(calls: list[KernelCall], rows: int, columns: int) -> Tensor:
    """How often each row sees each key."""
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for call in calls:
        every = torch.arange(columns)
        positions = every[call.keys] if isinstance(call.keys, slice) else call.keys
        query, key = call.rows.start, 0
        for queries, keys in zip(call.sequences.queries, call.sequences.keys, strict=True):
            for at in range(queries):
                seen[query + at, positions[key : key + keys - (queries - 1 - at)].long()] += 1
            query, key = query + queries, key + keys
        assert query == call.rows.stop and key == len(positions) <= columns
        for lengths, begins in (
            (call.sequences.queries, call.sequences.query_begins),
            (call.sequences.keys, call.sequences.key_begins),
        ):
            assert (
                begins.dtype == torch.int32
                and begins.tolist() == torch.tensor([0, *lengths]).cumsum(0).tolist()
            )
    return seen


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 4), SIZES)
def test_every_rank_sees_what_the_mask_shows_and_no_more(ranks: int, sizes: list[int]) -> None:
    ids, real = documents(*sizes), sum(sizes)
    rows = -(-real // (2 * ranks)) * 2 * ranks
    for order in (
        Order(ranks, real),
        Contiguous(ranks, real),
        per_document(padded(ids, 1, rows), ranks, real),
    ):
        for rank in range(ranks):
            mine = order.positions(rows, rank)
            (calls,) = calls_of(ids, mine, CPU)
            held = mine.size(-1)
            assert torch.equal(shown(calls, held, real), document_mask(ids, mine)[0, 0].long())


def test_whole_documents_are_one_call_for_each_row_of_the_batch_and_copy_no_keys() -> None:
    ids = torch.cat([documents(4, 1, 7), documents(12)])
    first, second = calls_of(ids, torch.arange(12), CPU)
    assert [(call.rows, call.keys, call.sequences.queries) for call in (*first, *second)] == [
        (slice(0, 12), slice(0, 12), (4, 1, 7)),
        (slice(0, 12), slice(0, 12), (12,)),
    ]


def test_documents_that_go_on_after_another_are_not_packed() -> None:
    assert are_packed(torch.tensor([[0, 0, 2, 1], [5, 5, 5, 5]]))
    assert not are_packed(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]))


def test_without_values_there_is_one_document() -> None:
    (call,) = calls_of(documents(3, 5).to("meta"), torch.arange(4), torch.device("meta"))[0]
    assert (call.rows, call.sequences.queries, call.sequences.keys) == (slice(0, 4), (4,), (8,))
    assert isinstance(call.keys, Tensor) and call.keys.shape == (8,)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_device_gets_one_copy_and_the_host_reads_nothing_from_it(batch: int) -> None:
    copies: list[Any] = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None:
                copies.append(result.numel())
            return result

    ids = documents(30, 2, 5, 27).expand(batch, -1)
    with Watch():
        calls = calls_of(ids, per_document(ids, 2).positions(64, 1), torch.device("meta"))
    assert len(copies) == 1 and copies[0] < 64 * 5 * batch
    for call in calls[0]:
        assert call.sequences.query_begins.is_meta and isinstance(call.keys, Tensor) and call.keys.is_meta
