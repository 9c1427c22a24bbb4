"""Copies to a GPU go through page-locked memory and do not make the host wait. Meta tensors stand in for the GPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import parallelizer as pz
from parallelizer import torch_private
from parallelizer.styles.context_parallel import attention
from parallelizer.styles.context_parallel.dealing import by_cost, per_document
from parallelizer.styles.context_parallel.order import Contiguous, Dealt, Order
from parallelizer.styles.context_parallel.to_device import to_device
from tests.parity import plan

CUDA = torch.device("cuda", 0)


class StandIn(TorchFunctionMode):
    """Notes each copy to a GPU: its values, and whether the host would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[Tensor] = []
        self.copied: list[Tensor] = []
        self.waits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty_like and kwargs.pop("pin_memory", False):
            self.locked.append(func(*args, **kwargs))
            return self.locked[-1]
        if func is torch.Tensor.to and torch.device(args[1]).type == "cuda":
            locked = any(args[0] is one for one in self.locked)
            self.waits += not (locked and kwargs.get("non_blocking", False))
            self.copied.append(args[0])
            return args[0].to("meta")
        return func(*args, **kwargs)


def batch() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(16).reshape(2, 8), "labels": torch.arange(16).reshape(2, 8) + 1}


BUFFERS = 'rules: {"": fsdp}\nbuffers: {batch: {input_ids: 1, labels: 1, positions: positions}}\n'


def test_the_host_waits_for_no_entry_of_a_batch() -> None:
    with StandIn() as copies:
        local = pz.shard_batch(batch(), plan(BUFFERS), None, device=CUDA)
    assert copies.waits == 0 and len(copies.copied) == 3
    assert all(tensor.is_meta for tensor in local.values())
    for name, copied in zip(local, copies.copied, strict=True):
        right = torch.arange(8).expand(2, 8) if name == "positions" else batch()[name]
        assert torch.equal(copied, right) and local[name].shape == right.shape


def test_the_copy_does_not_share_memory_with_the_batch() -> None:
    given = batch()
    with StandIn() as copies:
        pz.shard_batch(given, plan(BUFFERS), None, device=CUDA)
    given["input_ids"].zero_()
    assert torch.equal(copies.copied[0], batch()["input_ids"])


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_on_the_cpu_nothing_is_copied(device: torch.device | str) -> None:
    tensor = torch.arange(4)
    with StandIn() as copies:
        assert to_device(tensor, device) is tensor
    assert not copies.locked and not copies.copied


def test_tensors_of_other_classes_and_layouts_are_copied_by_torch() -> None:
    sparse = torch.eye(3).to_sparse()
    parameter = torch.nn.Parameter(torch.ones(2))
    with StandIn() as copies:
        to_device(sparse, CUDA), to_device(parameter, CUDA), to_device(torch.empty(2, device="meta"), CUDA)
    assert not copies.locked and copies.waits == 3


class Copies(torch_private.TorchDispatchMode):
    """Counts copies from the host to the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moves = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None
        self.count += moves and not args[0].is_meta
        return func(*args, **(kwargs or {}))


def of_two_documents() -> Dealt:
    return per_document(torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7]), 2)


def of_costs() -> Dealt:
    return by_cost(torch.arange(16), 2)


@pytest.mark.parametrize("make", [of_two_documents, of_costs])
def test_an_order_is_copied_once_for_all_layers(make: Callable[[], Dealt]) -> None:
    order, copies = make(), Copies()
    with copies:
        for _ in range(3):
            part = order.split(torch.empty(2, 16, 4, device="meta"), 1, 0)
            assert order.join([part, part], 1).shape == (2, 16, 4)
            assert order.positions(16, 1, torch.device("meta")).is_meta
    assert copies.count == 2


@pytest.mark.parametrize("order", [Order(2), Order(1), Contiguous(2)])
def test_positions_of_an_order_without_a_batch_are_made_on_the_device(order: Order) -> None:
    with Copies() as copies:
        made = order.positions(16, 0, torch.device("meta"))
    assert made.is_meta and made.shape == order.positions(16, 0).shape and copies.count == 0


def test_a_causal_mask_of_a_rank_s_rows_is_made_on_the_device() -> None:
    q, order = torch.empty(2, 1, 8, 4, device="meta"), of_two_documents()
    with Copies() as copies:
        for _ in range(3):
            assert attention._causal_rows(order, q, 1).shape == (2, 1, 8, 16)
    assert copies.count == 1


def test_what_an_evaluation_has_copied_can_be_used_in_training() -> None:
    order = of_two_documents()
    with torch.inference_mode():
        whole = torch.ones(2, 16)
        order.join([order.split(whole, 1, rank) for rank in range(2)], 1)
    trained = torch.ones(2, 16, requires_grad=True)
    order.join([order.split(trained, 1, rank) for rank in range(2)], 1).sum().backward()
