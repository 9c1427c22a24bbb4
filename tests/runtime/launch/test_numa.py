"""A rank on a GPU runs on the cores of the NUMA node of its GPU, unless its cores are chosen already."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallelizer.child.in_time import in_time
from parallelizer.runtime.launch import gpu_rank, numa

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two cores are needed to choose one")

GPUS = ["0000:17:00.0", "0000:65:00.0", "0001:9a:00.0", "0001:c8:00.0"]
"""Of which the first three are attached to node 0, and the last one to node 1."""


def machine(system: Path, nodes: Mapping[int, list[int]], online: list[int] = CORES) -> None:
    """Describe a machine in `system` as Linux does in /sys. The last GPU is at the last of its nodes."""
    for node, cores in nodes.items():
        folder = system / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, cores)) + "\n")
    (system / "devices/system/cpu").mkdir(parents=True)
    (system / "devices/system/cpu/online").write_text(",".join(map(str, online)) + "\n")
    for number, gpu in enumerate(GPUS):
        folder = system / "bus/pci/devices" / gpu
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{max(nodes) if number == 3 else min(nodes)}\n")


def bound(system: Path, own: int, gpus: list[str] = GPUS) -> tuple[int, set[int], set[int], set[int]]:
    """How many GPUs hang on the node, and the cores of the main thread, of one that was there before, and of a new one."""
    old, new = set[int](), set[int]()
    ready, go = threading.Event(), threading.Event()

    def early() -> None:
        ready.set()
        go.wait()
        old.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=early)
    thread.start()
    ready.wait()
    count = numa.bind_to_node_of(gpus, own, system)
    go.set()
    thread.join()
    late = threading.Thread(target=lambda: new.update(os.sched_getaffinity(0)))
    late.start()
    late.join()
    return count, os.sched_getaffinity(0), old, new


def test_all_threads_of_a_rank_run_on_the_cores_of_its_gpu_s_node(tmp_path: Path) -> None:
    machine(tmp_path, {0: CORES[1:], 1: CORES[:1]})
    first, last = set(CORES[1:]), {CORES[0]}
    assert in_time(lambda: bound(tmp_path, 2), 20) == (3, first, first, first)
    assert in_time(lambda: bound(tmp_path, 3), 20) == (1, last, last, last)
    assert os.sched_getaffinity(0) == set(CORES)


def test_cores_that_are_chosen_already_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, {0: CORES[1:], 1: CORES[:1]}, online=[*CORES, CORES[-1] + 1])
    everywhere = (4, set(CORES), set(CORES), set(CORES))
    assert in_time(lambda: bound(tmp_path, 0), 20) == everywhere
    (tmp_path / "devices/system/cpu/online").write_text(",".join(map(str, CORES)))
    monkeypatch.setenv(numa.SWITCH, "0")
    assert in_time(lambda: bound(tmp_path, 0), 20) == everywhere
    monkeypatch.delenv(numa.SWITCH)
    assert in_time(lambda: bound(tmp_path, 0), 20)[0] == 3


def test_nothing_is_bound_where_the_node_is_not_known(tmp_path: Path) -> None:
    everywhere = (4, set(CORES), set(CORES), set(CORES))
    assert in_time(lambda: bound(tmp_path / "nothing", 0), 20) == everywhere
    machine(tmp_path, {-1: CORES[1:]})  # Linux writes -1, and there is no such node
    (tmp_path / "devices/system/node/node-1/cpulist").unlink()
    assert in_time(lambda: bound(tmp_path, 0), 20) == everywhere
    (tmp_path / "devices/system/node/node-1/cpulist").write_text("all of them\n")
    assert in_time(lambda: bound(tmp_path, 0), 20) == everywhere
    # One node has all cores, and the last GPU is attached to a node without any.
    (tmp_path / "bus/pci/devices" / GPUS[3] / "numa_node").write_text("1\n")
    (tmp_path / "devices/system/node/node-1/cpulist").write_text(",".join(map(str, CORES)))
    assert in_time(lambda: bound(tmp_path, 0), 20) == everywhere


def prepared(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, local_ranks: int
) -> tuple[list[int], list[str], int]:
    """The threads that a rank takes, and what it asks to be bound to, on a machine of four GPUs and 64 cores."""
    asked: list[tuple[list[str], int]] = []
    threads: list[int] = []

    def bind(gpus: list[str], own: int) -> int:
        asked.append((gpus, own))
        return 2

    monkeypatch.setattr(numa, "bind_to_node_of", bind)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(pci_domain_id=gpu // 2, pci_bus_id=0x17 + gpu, pci_device_id=0),
    )
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.autograd, "set_multithreading_enabled", lambda enabled: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in ("PYTORCH_ALLOC_CONF", *gpu_rank._NCCL):
        monkeypatch.setenv(name, "1")
    gpu_rank.prepare_gpu_rank(local_rank, local_ranks)
    ((gpus, own),) = asked
    return threads, gpus, own


def test_ranks_of_one_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["0000:17:00.0", "0000:18:00.0", "0001:19:00.0", "0001:1a:00.0"]
    assert prepared(monkeypatch, 2, 4) == ([32], addresses, 2)
    # Eight ranks share four GPUs.
    assert prepared(monkeypatch, 6, 8) == ([32], addresses * 2, 6)
