"""Groups of gloo: none for an axis of a mesh of GPUs, one over the world for objects and checkpoints; and what a step sends."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.runtime import object_group
from parallelizer.runtime.fail_together import gathered
from parallelizer.runtime.launch import gpu_rank, numa, rank
from parallelizer.training.guards import Guards
from tests.parity import token_loss
from tests.ranks import run_ranks
from tests.runtime.guards.planted import adam, mesh_of, parallel, parts_of
from tests.training.test_guards import SETTINGS


def steps_sent(told_with_the_step: bool) -> tuple[list[str], list[str]]:
    """The groups that are made for a run's loop, and the collectives of its third step."""
    made: list[str] = []
    new_group = dist.new_group

    def recorded(*args: Any, **more: Any) -> Any:
        made.append(str(more.get("backend")))
        return new_group(*args, **more)

    with mock.patch.object(dist, "new_group", recorded):
        mesh = mesh_of(dp_shard=2)
        model, parts = parallel(mesh), parts_of(mesh)
        optimizer = adam(model)
        guards = Guards(SETTINGS, model, optimizer, token_loss, leads=False)
        sent: list[str] = []
        all_reduce = dist.all_reduce

        def noted(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
            sent.append(f"{tensor.numel()} {tensor.dtype}")
            return all_reduce(tensor, *args, **more)

        for step in (1, 2, 3):
            words = guards.words(step, 8 * step, stop=15 * (step == 3) * dist.get_rank())
            sent.clear()
            with mock.patch.object(dist, "all_reduce", noted):
                done = pz.train_step(
                    model,
                    parts,
                    token_loss,
                    optimizer,
                    1.0,
                    skip_nonfinite=True,
                    words=words if told_with_the_step else None,
                )
                stop = guards.after(step, done, parts, samples=8 * step, stop=15 * (step == 3))
            assert stop == 15 * (step == 3)
    return made, list(sent)


@pytest.mark.ranks
def test_what_ranks_agree_on_travels_with_the_check_of_the_step() -> None:
    """One collective a step less than with an exchange of its own, and no group for it."""
    before, after = run_ranks(steps_sent, 2, False)[1], run_ranks(steps_sent, 2, True)[1]
    assert before[0] == ["gloo"] and after[0] == []
    assert len(before[1]) - len(after[1]) == 1
    assert "5 torch.int64" in before[1] and "7 torch.int64" in after[1]


def apart() -> Any:
    mesh = mesh_of(dp_shard=2)
    model, parts = parallel(mesh), parts_of(mesh)
    optimizer = adam(model)
    guards = Guards(SETTINGS, model, optimizer, token_loss, leads=False)
    words = guards.words(4 + dist.get_rank(), 8)
    done = pz.train_step(model, parts, token_loss, optimizer, 1.0, skip_nonfinite=True, words=words)
    try:
        guards.after(4, done, parts)
    except pz.PlanError as error:
        return error.diagnostics[0].code, error.diagnostics[0].message
    return None


@pytest.mark.ranks
def test_ranks_at_different_steps_are_found_by_the_words_of_the_step() -> None:
    found = run_ranks(apart, 2)
    assert found == [("out-of-step", "rank 0 is at step 4; rank 1 is at step 5")] * 2


class Recorded:
    """Stands in for torch.distributed and CUDA as a rank on a GPU sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 8) -> None:
        self.backends: list[str] = []
        self.devices: list[torch.device] = []
        self.threads: list[int] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "set_device", self.devices.append)
        monkeypatch.setattr(numa, "address", lambda gpu: f"0000:{gpu:02x}:00.0")
        monkeypatch.setattr(torch, "set_num_threads", self.threads.append)
        monkeypatch.setattr(torch.autograd, "set_multithreading_enabled", self.backends_of_autograd)
        monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: self.backends.append(backend))
        monkeypatch.setattr(dist, "new_group", lambda backend, **more: self.backends.append(backend))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        monkeypatch.setattr(dist, "get_rank", lambda group=None: 3)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, **more: tensor.fill_(ranks))
        monkeypatch.setattr(torch, "ones", lambda size, device: torch.zeros(size))
        monkeypatch.setattr(rank.torch_private, "set_group_timeout", lambda timeout: None)
        monkeypatch.setattr(object_group, "_made", object_group._Groups(object(), None))  # type: ignore[arg-type]
        self.multithreading: list[bool] = []

    def backends_of_autograd(self, enabled: bool) -> None:
        self.multithreading.append(enabled)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_NUM_THREADS",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_GLOO_LAZY_INIT",
    ):
        monkeypatch.setenv(name, "")  # so that the test's end removes what is set now
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    return Recorded(monkeypatch)


def test_a_world_of_gpus_has_one_group_of_gloo(recorded: Recorded, tmp_path: Path) -> None:
    rank.enter_group("cuda", 3, 60.0)
    assert recorded.backends == ["nccl", "gloo"]
    pz.Checkpoints(tmp_path)
    pz.Checkpoints(tmp_path)
    object_group.object_group()
    assert recorded.backends == ["nccl", "gloo"]


def test_a_rank_on_a_gpu_takes_its_share_of_the_cores(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    rank.enter_group("cuda", 3, 60.0)
    assert (recorded.threads, recorded.devices) == ([12], [torch.device("cuda", 3)])
    assert gpu_rank.threads(100) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rank.enter_group("cuda", 3, 60.0)
    assert recorded.threads == [12]


def test_a_rank_on_a_gpu_runs_backward_in_its_main_thread(recorded: Recorded) -> None:
    rank.enter_group("cuda", 0, 60.0)
    assert recorded.multithreading == [False]


def test_what_the_user_has_set_stays(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.enter_group("cuda", 0, 60.0)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    rank.enter_group("cuda", 0, 60.0)
    assert "PYTORCH_ALLOC_CONF" not in os.environ and "TORCH_FR_BUFFER_SIZE" not in os.environ


DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Where NCCL's groups write their record, by torch's newer and its older name."""


def dumps_of(device: str, log_dir: Path | None, folder: Path) -> set[str | None]:
    """What both variables are after a rank has entered its group."""
    job = rank.Launch(print, (), 8, device, log_dir, 60.0, 0, folder, os.getpid())  # type: ignore[arg-type]
    rank._enter(job, 3)
    return {os.environ.get(name) for name in DUMPS}


def test_a_rank_on_a_gpu_writes_the_record_of_its_collectives_into_the_run_s_folder(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    for name in (*DUMPS, pipe, "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert dumps_of("cpu", tmp_path, tmp_path) == dumps_of("cuda", None, tmp_path) == {None}
    assert dumps_of("cuda", tmp_path / "logs", tmp_path) == {f"{tmp_path}/logs/collectives_rank"}
    assert os.environ[pipe] == f"{tmp_path}/collectives."
    for name in DUMPS:
        monkeypatch.delenv(name)
    monkeypatch.setenv(DUMPS[1], "/elsewhere/rank")
    assert dumps_of("cuda", tmp_path / "logs", tmp_path) == {None, "/elsewhere/rank"}


def shared() -> list[list[int]]:
    """A thread and the main thread use one group, on rank 1 in another order unless they wait for each other."""
    said: list[list[int]] = []

    def write() -> None:
        time.sleep(0.3 * dist.get_rank())
        said.append(gathered(10 + dist.get_rank(), object_group.background_group(60.0)))

    with mock.patch.object(dist, "get_backend_config", lambda group=None: "cuda:nccl"):
        object_group.object_group()
        object_group.lend(threading.Thread(target=write))
        said.append(gathered(dist.get_rank()))
    return said


def opened() -> int:
    """How many sockets a rank has more after objects have been gathered in the group."""

    def sockets() -> int:
        files = Path("/proc/self/fd").iterdir()
        return sum(os.readlink(file).startswith("socket:") for file in files if file.is_symlink())

    before = sockets()
    with mock.patch.object(dist, "get_backend_config", lambda group=None: "cuda:nccl"):
        gathered(dist.get_rank())
    return sockets() - before


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_a_rank_has_as_many_sockets_for_objects_in_a_larger_world() -> None:
    """A listener, and a connection to each neighbour."""
    assert (run_ranks(opened, 3), run_ranks(opened, 6)) == ([3] * 3, [3] * 6)


@pytest.mark.ranks
def test_the_main_thread_waits_for_a_thread_that_uses_the_group() -> None:
    assert run_ranks(shared, 2) == [[[10, 11], [0, 1]]] * 2
