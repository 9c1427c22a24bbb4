"""The ring's operators rebuild what they are told as plain values. `test_compile` and `test_compiled_layers` run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelizer.styles.context_parallel import ring_operator
from parallelizer.styles.context_parallel.order import Contiguous, Dealt, Order

DEALT = torch.tensor([[[0, 3], [1, 2]]])


@pytest.mark.parametrize(
    "order",
    [Order(2), Order(2, 7), Contiguous(2), Contiguous(2, 7), Dealt(2, 4, DEALT, "by-cost")],
    ids=["head-tail", "padded", "none", "padded none", "dealt"],
)
@pytest.mark.parametrize("places", [range(4), range(1, 8, 4)], ids=["whole", "column"])
def test_order_and_part_are_those_of_the_call(
    order: Order, places: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: dict[str, Any] = {"cp": object()}
    monkeypatch.setattr("parallelizer.torch_private.group_of", groups.__getitem__)
    dealt = order.dealt if isinstance(order, Dealt) else None
    found = ring_operator._ring(
        None, dealt, order.name, order.ranks, order.length, "cp", list(places), True, 0.5
    )
    assert (found.is_causal, found.scale, found.mask) == (True, 0.5, None)
    assert found.part.group is groups["cp"] and found.part.places == places
    assert type(found.order) is type(order) and found.order.name == order.name
    assert (found.order.ranks, found.order.length) == (order.ranks, order.length)
    assert not isinstance(order, Dealt) or torch.equal(found.order.dealt, order.dealt)
