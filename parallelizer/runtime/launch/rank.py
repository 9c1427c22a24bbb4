"""One rank on its own side: its process group, and the life of a rank that `launch.start` has started.

Such a rank reports its progress to its parent by notes, small files in a private folder. They work in the
same way for forked and spawned ranks, and outlive the rank that wrote them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from parallelizer import torch_private
from parallelizer.child import cuda_use
from parallelizer.runtime.launch import heartbeat, records
from parallelizer.runtime.launch.failures import Failure as Failure
from parallelizer.runtime.launch.failures import LaunchError, failure_of
from parallelizer.runtime.launch.gpu_rank import prepare_gpu_rank
from parallelizer.runtime.launch.stacks import answer_requests
from parallelizer.runtime.launch.stopping import stop_signals
from parallelizer.runtime.object_group import object_group

Device = Literal["cpu", "cuda"]

# Looked up before any fork: a child must not need the loader's lock, which another thread may have held.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """What every rank is told: `folder` takes its notes, `parent` is the process it must not outlive."""

    worker: Callable[..., Any]
    args: tuple
    ranks: int
    device: Device
    log_dir: Path | None
    collective_timeout: float
    attempt: int
    folder: Path
    parent: int
    graceful: float = 0.0
    """Seconds that ranks get to save and end by themselves; 0 where they are ended at once."""
    stuck_after: float = 0.0
    sees_gpus: bool = False
    prepare: tuple[Callable[[], None], ...] = ()
    """What is called before the worker: see `new_process.prepare_by`."""


def run_rank(job: Launch) -> None:
    """One rank from beginning to end.

    Its notes, in order: `born` (its process id), `started` (the group stands), then `finished` (the worker's
    pickled result) or `failed` (why). A rank that fails ends here, with exit code 1 or the worker's own.
    """
    rank = int(os.environ["RANK"])
    if job.device == "cpu" and not job.sees_gpus:
        # Else its first backward starts a thread for every GPU.
        cuda_use.hide_gpus()
    _end_with(job.parent)
    _quiet_signals()
    # It logs the traceback of an exception that is raised all the same.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL + 1)
    _note(job, "born", rank, os.getpid())
    try:
        _redirect(job, rank)
        answer_requests(job.folder, rank)
        beats = heartbeat.Beats(job.folder / "beats", job.ranks)
        heartbeat.tell_to(lambda step, doing: beats.say(rank, step, doing))
        _enter(job, rank)
        _note(job, "started", rank, None)
        result = pickle.dumps(_call(job))
        dist.destroy_process_group()
        # Not returned to the agent: it reads results from pipes, and would wait for ever for the rest of one
        # whose rank was killed as it wrote.
        _note(job, "finished", rank, result)
    except BaseException as error:
        _note(job, "failed", rank, failure_of(rank, error, _exit_code(error), job.log_dir, __file__))
        sys.stdout.flush()
        sys.stderr.flush()
        # Neither destructors nor exit handlers: they might wait for ranks that wait for this one.
        os._exit(_exit_code(error))


def _enter(job: Launch, rank: int) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(job.attempt)
    if loopback := _loopback():
        # Else gloo looks this machine's name up to find an interface: slow, or wrong, on many a laptop.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    # Not a TCP store: that needs a port found beforehand, which another process may take meanwhile, listens on
    # all interfaces, resolves host names, and is gone as soon as rank 0 has finished.
    store = dist.FileStore(str(job.folder / "store"), job.ranks)
    store.set_timeout(timedelta(seconds=job.collective_timeout))
    if job.device == "cuda" and job.log_dir is not None:
        records.write_to(job.log_dir)
        records.listen_in(job.folder)
    enter_group(job.device, rank, job.collective_timeout, store, rank, job.ranks)


def _call(job: Launch) -> Any:
    try:
        for prepare in job.prepare:
            prepare()
        return job.worker(*job.args)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise


def _end_with(parent: int) -> None:
    """End when the parent ends, however it ends. (Only on Linux: elsewhere a killed parent is outlived.)"""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _quiet_signals() -> None:
    """End on a signal at once, even inside a collective, and without a traceback: the parent says it all."""
    for number in (signal.SIGINT, signal.SIGHUP, *stop_signals()):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)


def _redirect(job: Launch, rank: int) -> None:
    if rank == 0:
        return
    path = job.log_dir / f"rank{rank}.log" if job.log_dir else Path(os.devnull)
    stream = open(path, "a" if job.attempt else "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream


def _exit_code(error: BaseException) -> int:
    code = error.code if isinstance(error, SystemExit) else 1
    return (code & 0xFF if isinstance(code, int) else 1) or 1


def _note(job: Launch, kind: str, rank: int, content: object) -> None:
    unfinished = job.folder / f"unfinished.{rank}"
    unfinished.write_bytes(pickle.dumps(content))
    unfinished.replace(job.folder / f"{kind}.{rank}")


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def enter_group(
    device: Device,
    local_rank: int,
    collective_timeout: float,
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the default process group and prove it with one all-reduce over all ranks.

    Without a `store` the group is found through torchrun's environment variables. A CPU rank has one torch
    thread: ranks share the cores, and a forked rank must not wait for OpenMP threads that only its parent
    has. On CUDA the rank takes the GPU of its `local_rank`, or the only one that its launcher lets it see. Its groups
    are of NCCL, and one of gloo carries objects: see `object_group`. `collective_timeout` is that of every group made
    later, too.
    """
    timeout = timedelta(seconds=collective_timeout)
    torch_private.set_group_timeout(timeout)
    if device == "cuda":
        place = prepare_gpu_rank(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        dist.init_process_group(
            "nccl", timeout=timeout, store=store, rank=rank, world_size=world_size, device_id=place
        )
        object_group()  # made while every rank is here
    else:
        place = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=world_size)
    met = torch.ones(1, device=place)
    dist.all_reduce(met)
    if int(met.item()) != dist.get_world_size():
        raise LaunchError(f"the first all-reduce met {int(met.item())} of {dist.get_world_size()} ranks")


@contextmanager
def environment(variables: Mapping[str, str], changed: Iterable[str] = ()) -> Iterator[None]:
    """Some environment variables. They, and those that are `changed` meanwhile, are as they were again afterwards."""
    before = {name: os.environ.get(name) for name in (*variables, *changed)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
