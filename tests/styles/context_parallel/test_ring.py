"""The order in which a ring computes and communicates: what is on its way while blocks are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelizer.child.children import in_children
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.styles.context_parallel import ring
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.part import whole

RANKS, ROWS = 4, 8


def backward_in_order(rank: int) -> list[str]:
    """What `ring_backward` does, in order: blocks that are computed, gradients that are sent, and waits for them."""
    enter_fake_world(RANKS, rank)
    noted: list[str] = []
    compute, exchanged = ring.block_backward, ring._exchanged

    class Arrival:
        def wait(self) -> None:
            noted.append("arrived")

    def noted_compute(*args: Any, **kwargs: Any) -> Any:
        noted.append("compute")
        return compute(*args, **kwargs)

    def noted_exchange(*args: Any) -> Any:
        noted.append("send")
        return replace(exchanged(*args), works=[Arrival()])

    ring.block_backward, ring._exchanged = noted_compute, noted_exchange  # in a child of the test's process
    part = whole(dist.group.WORLD)
    attention = ring.Ring(part, Order(part.ranks, ROWS * RANKS), is_causal=False, scale=1.0)
    q, k, v, out, grad = torch.randn(5, 1, 2, ROWS, 8).unbind()
    ring.ring_backward(grad, q, k, v, out, torch.zeros(1, 2, ROWS), attention)
    return noted


@pytest.mark.parametrize("rank", [0, 3])
def test_gradients_of_a_block_travel_while_the_next_one_is_computed(rank: int) -> None:
    [noted] = in_children([(backward_in_order, rank)])
    first, *middle, last = ["compute", "send"], *(RANKS - 2) * [["compute", "arrived", "send"]], ["arrived"]
    assert noted == ["compute", *first, *(what for turn in middle for what in turn), *last]
