"""The memory that a run reports, on a CPU and with a stand-in for CUDA's allocator."""

from __future__ import annotations

import pytest
import torch

from parallelizer.training.watch.memory import Memory, memory


def test_of_a_gpu_it_is_what_is_in_use_and_what_the_allocator_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = {"memory_allocated": 1, "max_memory_allocated": 2, "max_memory_reserved": 3}
    for name, count in of.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count)
    assert memory(torch.device("cuda", 0)) == Memory(1, 2, reserved=3)


def test_of_a_cpu_it_is_the_process() -> None:
    found = memory(torch.device("cpu"))
    assert found is not None and found.whole and found.reserved is None and 0 < found.now <= found.peak
