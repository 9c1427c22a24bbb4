"""Copies to a GPU go through page-locked memory and do not make the host wait. Meta tensors stand in for the GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import parallelizer as pz
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
