"""Whole sequences to local rows and back, over cp."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelizer.language.plan import PARTIAL, REPLICATE, Flow, shard
from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.sequence import CurrentOrder, gather_sequence, relay
from tests.ranks import run_ranks


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_splitting_and_gathering_undo_each_other_and_so_do_their_gradients(ranks: int) -> None:
    whole = torch.randn(2, 4 * ranks, 4 * ranks, dtype=torch.float64)
    weights = torch.randn(ranks, *whole.shape, dtype=torch.float64)

    def worker() -> dict[int, tuple[bool, bool, Tensor, Tensor]]:
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        found = {}
        for dim in (1, 2, -1):
            local = balance.split(whole, dim, ranks, rank).clone().requires_grad_()
            gathered = relay(local, Flow(shard(dim), REPLICATE), group, CurrentOrder(Order(ranks)))
            # Every rank makes another use of the whole.
            (gathered * weights[rank]).sum().backward()
            assert local.grad is not None
            expected = balance.split(weights.sum(0), dim, ranks, rank)

            source = whole.clone().requires_grad_()
            part = relay(source, Flow(REPLICATE, shard(dim)), group, CurrentOrder(Order(ranks)))
            (part * balance.split(weights[0], dim, ranks, rank)).sum().backward()
            assert source.grad is not None
            total = source.grad.clone()
            dist.all_reduce(total)
            found[dim] = (
                torch.equal(gathered, whole), torch.equal(part, local), local.grad - expected, total - weights[0],
            )  # fmt: skip
        return found

    for by_dim in run_ranks(worker, ranks):
        for same_whole, same_part, gathered_error, split_error in by_dim.values():
            assert same_whole and same_part
            assert gathered_error.abs().max() < 1e-14 and split_error.abs().max() == 0


@pytest.mark.ranks
def test_a_gathered_tensor_may_lie_in_any_order_in_memory() -> None:
    def worker() -> bool:
        group = dist.group.WORLD
        assert group is not None
        whole = torch.arange(2 * 8 * 3).reshape(2, 8, 3)
        local = balance.split(whole, 1, 2, dist.get_rank()).transpose(0, 2).contiguous().transpose(0, 2)
        assert not local.is_contiguous()
        return torch.equal(gather_sequence(local, 1, group, Order(2)), whole)

    assert run_ranks(worker, 2) == [True, True]


@pytest.mark.ranks
def test_what_neither_splits_nor_gathers_is_refused() -> None:
    def worker() -> None:
        group, sequence = dist.group.WORLD, CurrentOrder(Order(2))
        assert group is not None
        for flow in (Flow(REPLICATE), Flow(None, REPLICATE), Flow(PARTIAL, REPLICATE), Flow()):
            with pytest.raises(ValueError, match="neither splits nor gathers"):
                relay(torch.zeros(1, 4), flow, group, sequence)

    run_ranks(worker, 2)


@pytest.mark.ranks
def test_a_length_that_does_not_divide_is_padded_inside_the_model_and_comes_back_without() -> None:
    def worker() -> tuple[int, bool, int | None]:
        group, sequence = dist.group.WORLD, CurrentOrder(Order(2))
        assert group is not None
        whole = torch.arange(1, 8).reshape(1, 7)
        part = relay(whole, Flow(REPLICATE, shard(1)), group, sequence)
        return (
            part.size(1),
            torch.equal(relay(part, Flow(shard(1), REPLICATE), group, sequence), whole),
            sequence.order.length,
        )

    assert run_ranks(worker, 2) == [(4, True, 7)] * 2
