"""Starts a function on several ranks of this machine, through torch elastic, and makes sure that all of them
end.

On CPU the ranks are forked. They have torch and everything else imported already, and neither the worker nor
its arguments are pickled. On CUDA, and where this process has used CUDA and cannot fork, they are spawned.
There the worker must be importable by name, and its arguments must pickle. Results are pickled on both.

The parent runs the elastic agent in one thread and a watcher in a second thread. When the ranks must end (a
start takes too long, Ctrl-C, one has died and the others hang), the watcher ends the processes. The agent
then returns by itself, as it does for any failure. Nothing is ever raised inside the agent, which may be
about to fork. Afterwards the parent reads the notes that each rank leaves in a private folder.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallelizer.child import cuda_use, new_process
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.runtime.launch import lone_rendezvous
from parallelizer.runtime.launch.ends import has_obeyed, what_happened, who_ended
from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.launch.outside import OutsideRanks, join, leave, outside_ranks
from parallelizer.runtime.launch.rank import Device, Launch, environment, run_rank
from parallelizer.runtime.launch.restarts import End, Restarts
from parallelizer.runtime.launch.stopping import Signals, noted_signals
from parallelizer.runtime.launch.watch import PERIOD, Watch, end, keep_watch

__all__ = ["LaunchError", "OutsideRanks", "join", "leave", "outside_ranks", "start"]

T = TypeVar("T")
StartMethod = Literal["fork", "spawn"]

_LOST = 10.0
"""Seconds after the end of the last rank in which the elastic agent must have noticed."""


def start(
    worker: Callable[..., T],
    args: tuple = (),
    *,
    ranks: int,
    device: Device,
    log_dir: Path | None = None,
    start_timeout: float = 120.0,
    collective_timeout: float = 600.0,
    max_restarts: int = 0,
    stuck_after: float = 300.0,
    graceful: float = 0.0,
    sees_gpus: bool = False,
) -> list[T]:
    """Run `worker(*args)` on `ranks` processes of this machine and return what they return, in order of rank.

    Each rank stands in a process group over all of them (gloo; on CUDA NCCL too) and has RANK, LOCAL_RANK,
    WORLD_SIZE and TORCHELASTIC_RESTART_COUNT in its environment. Rank 0 writes to this process's stdout and
    stderr, the others to `log_dir/rank<k>.log`, or nowhere. Results are pickled: keep them small. Times are
    in seconds: `start_timeout` to the end of the first all-reduce over all ranks, `collective_timeout` for
    any one collective.

    When a rank fails or is killed all are ended, and started again up to `max_restarts` times; a line on stderr
    says so. Three ends of one rank in a row at the same step (by its `heartbeat.beat`; before the first counts as
    one) are the last.

    A worker that calls `heartbeat.beat` is watched: when the slowest rank has not moved for `stuck_after` seconds
    (0 for never), stderr says which rank the others wait for, at which step, and where it stands. Nothing is
    ended for it; a collective that waits longer than `collective_timeout` fails by itself.

    With `graceful` above 0, SIGTERM and SIGUSR1 are passed on to the ranks, which get so many seconds to return
    (see `stopping.stop_requests`): then their results are returned. Those left after that, and all at a second
    signal, are ended.

    With `sees_gpus` ranks of `device` cpu may use this machine's GPUs beside their group, which is gloo's; otherwise they see
    none.

    When it returns or raises, no rank is left, and signal handlers and environment are as they were. Raises
    - LaunchError when a rank raises, is killed or does not get going, after `max_restarts` further attempts, or
      after a request to stop;
    - PlanError, with the same diagnostics, when that is what a rank raised: no further attempt is made;
    - KeyboardInterrupt on SIGINT, SystemExit(128 + n) on SIGTERM and SIGHUP, once the ranks have ended. In a
      thread other than the main one, signals are left to the main thread.
    """
    method = _start_method(worker, args, device)
    _check_startable(ranks, method)
    restarts = Restarts(max_restarts)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    with noted_signals(graceful > 0) as got:
        for attempt in itertools.count():
            with tempfile.TemporaryDirectory(prefix="parallelizer-", ignore_cleanup_errors=True) as name:
                job = Launch(
                    worker,
                    args,
                    ranks,
                    device,
                    log_dir,
                    collective_timeout,
                    attempt,
                    folder=Path(name),
                    parent=os.getpid(),
                    graceful=graceful,
                    stuck_after=stuck_after,
                    sees_gpus=sees_gpus,
                    prepare=new_process.preparations(),
                )
                ended = _attempt(job, method, start_timeout, got)
            if isinstance(ended, list):
                return [pickle.loads(result) for result in ended]
            restarts.again(ended[1], ended[0])
    raise AssertionError("an attempt succeeds, or the restarts come to an end")


def _start_method(worker: Callable[..., object], args: tuple, device: Device) -> StartMethod:
    if device == "cuda":
        return "spawn"
    if not cuda_use.must_not_fork():
        return "fork"
    try:
        new_process.pickled((worker, args), getattr(worker, "__qualname__", str(worker)))
    except PlanError as error:
        found = error.diagnostics[0]
        raise LaunchError(found.message, found.help) from error
    return "spawn"


def _check_startable(ranks: int, method: StartMethod) -> None:
    if ranks < 1:
        raise LaunchError(f"{ranks} ranks cannot be started: at least one is needed")
    if method == "spawn":
        return
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError("this system cannot fork processes", "use Linux (on Windows: WSL), or torchrun")
    if dist.is_initialized():
        raise LaunchError(
            "this process has a process group, which forked ranks would inherit",
            "call `start` before the group is made, or after torch.distributed.destroy_process_group()",
        )


def _attempt(
    job: Launch, method: StartMethod, start_timeout: float, got: Signals
) -> list[bytes] | tuple[LaunchError, End]:
    """The pickled results, in order of rank, of one start; or why there are none, if it may be started again.

    No rank is left afterwards, whatever happens.
    """
    watch = Watch(job, frozenset(multiprocessing.active_children()))
    watch.beats()  # makes their file
    over = threading.Event()
    watcher = threading.Thread(target=keep_watch, args=(watch, start_timeout, got, over), daemon=True)
    agent = _Agent(job, method)
    watcher.start()
    try:
        with _quietly():
            agent.start()
            while not (agent.done.wait(1.0) or watch.all_ended(_LOST)):
                pass
    finally:
        over.set()
        watcher.join()
        end(watch.children())
        agent.leave.set()
        agent.join(_LOST)
    if got.at_once:
        raise _exit_by(got.numbers[0])
    if len(watch.ranks("finished")) == job.ranks and not isinstance(agent.trouble, ChildFailedError):
        return [watch.note("finished", rank) for rank in range(job.ranks)]
    trouble = agent.trouble or RuntimeError("the elastic agent was lost")
    if got and (not watch.asked or has_obeyed(watch, trouble)):
        raise _exit_by(got.stop)
    error = what_happened(watch, trouble)
    if isinstance(error, PlanError) or got:
        raise error from None
    return error, who_ended(watch, trouble, error)


def _exit_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class _Agent(threading.Thread):
    """One life of an elastic agent. It does no restarts, or it would restart what is ended on purpose.

    It has a thread of its own, which is left behind when it is lost: the agent tells the ranks that they may leave
    through a `multiprocessing.Event`, which waits for ever for one that was killed as it waited for that.
    The thread must not end before the ranks do, which are killed when the thread ends that has forked them: it
    stays until `leave` is set.
    """

    def __init__(self, job: Launch, method: StartMethod) -> None:
        super().__init__(name="elastic agent", daemon=True)
        self._job, self._method = job, method
        self.trouble: Exception | None = None
        """What the agent raised: it knows of one rank; the notes tell of all."""
        self.done, self.leave = threading.Event(), threading.Event()

    def run(self) -> None:
        """Start the ranks and wait until all have ended."""
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._job.ranks,
            run_id=self._job.folder.name,
            rdzv_backend=lone_rendezvous.NAME,
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=PERIOD,
            start_method=self._method,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            signals_to_handle="",  # they are ours, see noted_signals
        )
        try:
            elastic_launch(config, run_rank)(self._job)
        except Exception as error:
            self.trouble = error
        finally:
            self.done.set()
            self.leave.wait()


@contextmanager
def _quietly() -> Iterator[None]:
    # Ranks that connect to a store of the agent's were seen to hang after a fork. Ours has none to share.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    with environment(variables), _silence(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".*use of fork\(\) may lead to deadlocks", category=DeprecationWarning
        )
        yield


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torch elastic's loggers from saying in many lines what a LaunchError says in one."""
    loggers = [
        logging.getLogger(name)
        for name in (
            "torch.distributed.elastic",
            "torch.distributed.launcher",
            "torch.multiprocessing",
            "torchelastic-events-null",
        )
    ]
    before = [logger.propagate for logger in loggers]
    nothing = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nothing)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nothing)
