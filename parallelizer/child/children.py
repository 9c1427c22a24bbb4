"""Functions that run in children of this process, whose results come back pickled.

Whatever would leave something behind in a process runs in a child: a step on a fake world, a model that is watched, an
attempt that may never end. A child has one torch thread, however many its parent has: OpenMP's threads do not live on
in a forked process, which would wait for them forever. A child sees no GPU, unless it is started to use one.

A child is forked. It has everything that is imported already, and nothing is pickled on its way there. A process that
has used CUDA cannot fork: its children are new processes (`new_process.py`), and the functions and their arguments
must pickle.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from parallelizer.child import cuda_use, new_process
from parallelizer.diagnostics.diagnostic import PlanError


class WorldError(RuntimeError):
    """The child ended without a result; the message holds its traceback."""


Calls = Sequence[tuple[Callable[..., Any], *tuple[Any, ...]]]
"""Functions with their arguments."""


class _Child(Protocol):
    """A process that computes one result."""

    def fileno(self) -> int:
        """The file descriptor of what it sends, for `select`."""

    def read(self) -> bytes:
        """Everything that it sends, to its end."""

    def wait(self) -> int:
        """Wait until it has ended. Returns its exit code, negative for a signal."""

    def kill(self) -> object:
        """End it, and close what belongs to it."""


class Children:
    """A child for each call, side by side, from now on. As a context it kills on leaving it those whose results
    no caller has taken.
    """

    def __init__(self, calls: Calls, *, sees_gpus: bool = False) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        start = _start_new if calls and cuda_use.must_not_fork() else _start
        self._children: list[_Child] = []
        try:
            for function, *args in calls:
                self._children.append(start(function, args, sees_gpus))
        except BaseException:
            self.__exit__()
            raise

    def results(self) -> list[Any]:
        """Wait for all, and return what they return, which must pickle.

        PlanError is raised again here with its diagnostics; anything else as WorldError. What they print goes to
        stderr. No child is left, whatever happens.
        """
        children, self._children = self._children, []
        try:
            answers = [child.read() for child in children]
        except BaseException:
            _kill(children)
            raise
        codes = [child.wait() for child in children]
        return [_result(data, code) for data, code in zip(answers, codes, strict=True)]

    def filenos(self) -> list[int]:
        """The file descriptors of what they send, until the results are taken."""
        return [child.fileno() for child in self._children]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: Any) -> None:
        _kill(self._children)
        self._children = []


def first_done(some: Sequence[Children]) -> Children:
    """Wait until one of them has a child that sends its result, and return it. Of several it is the first of `some`."""
    filenos = {fileno: each for each in some for fileno in each.filenos()}
    with selectors.DefaultSelector() as selector:
        for fileno in filenos:
            selector.register(fileno, selectors.EVENT_READ)
        done = {filenos[key.fd] for key, _ in selector.select()}
    return next(each for each in some if each in done)


def _kill(children: Sequence[_Child]) -> None:
    for child in children:
        child.kill()


def in_children(calls: Calls, *, sees_gpus: bool = False) -> list[Any]:
    """Run each call in a child of its own, side by side, and return what they return: see `Children.results`. With `sees_gpus`
    they may use this machine's GPUs.
    """
    return Children(calls, sees_gpus=sees_gpus).results()


@dataclass(frozen=True)
class _Forked:
    """A forked child, and what it sends."""

    pid: int
    stream: BinaryIO

    def fileno(self) -> int:
        return self.stream.fileno()

    def read(self) -> bytes:
        with self.stream:
            return self.stream.read()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.stream.close()


def _start(function: Callable[..., Any], args: Sequence[Any], sees_gpus: bool) -> _Child:
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _child(send, function, args, sees_gpus)
    os.close(send)
    return _Forked(pid, os.fdopen(receive, "rb"))


def _start_new(function: Callable[..., Any], args: Sequence[Any], sees_gpus: bool) -> _Child:
    return new_process.start(_new_child, function, args, sees_gpus=sees_gpus)


def _result(data: bytes, code: int) -> Any:
    if not data or code < 0:
        raise WorldError(f"the process that it ran in {_ending(code)}, without a result")
    kind, value = pickle.loads(data)
    if kind == new_process.DIAGNOSTICS:
        raise PlanError(value)
    if kind == "error":
        raise WorldError(value)
    return value


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    return (
        f"was killed by {signal.Signals(-code).name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"
    )


def _child(send: int, function: Callable[..., Any], args: Sequence[Any], sees_gpus: bool) -> None:
    """Runs in the child and never returns: no exit handler of the parent runs twice."""
    status = 1
    try:
        _leave_interrupts_to_the_parent()
        if not sees_gpus:
            cuda_use.hide_gpus()
        gc.freeze()  # what the parent has made outlives the child: it is never collected, and its pages stay shared
        status = _send(send, lambda: _answer(function, args))
    finally:
        os._exit(status)


def _new_child(send: int, call: new_process.PickledCall) -> None:
    """As `_child`, in a new process, whose function and arguments are yet to be unpickled."""
    status = 1
    try:
        _leave_interrupts_to_the_parent()
        status = _send(send, lambda: _answer_of(call))
    finally:
        os._exit(status)


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches every process of a terminal. The parent ends its children; a child that is interrupted may be in
    the middle of torch's C++ code, which then ends the process with a stack of its own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer_of(call: new_process.PickledCall) -> tuple[bytes, int]:
    try:
        function, args = call.loaded()
    except PlanError as error:
        return pickle.dumps((new_process.DIAGNOSTICS, error.diagnostics)), 0
    use_one_thread()  # torch may be imported only now
    return _answer(function, args)


def _send(send: int, answer: Callable[[], tuple[bytes, int]]) -> int:
    """Send an answer to the parent, and return the status to end with."""
    use_one_thread()
    # What a model prints must not stand in a document on stdout.
    sys.stdout = sys.stderr
    with contextlib.suppress(OSError):  # no stderr
        os.dup2(2, 1)
    data, status = answer()
    with os.fdopen(send, "wb") as stream:
        stream.write(data)
    sys.stderr.flush()
    return status


def use_one_thread() -> None:
    """Let torch compute without OpenMP's threads, which only the parent has. A torch that is imported later starts its own."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _answer(function: Callable[..., Any], args: Sequence[Any]) -> tuple[bytes, int]:
    """What is sent to the parent, and the status to end with."""
    try:
        return pickle.dumps(("result", function(*args))), 0
    except PlanError as error:
        return pickle.dumps((new_process.DIAGNOSTICS, error.diagnostics)), 0
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc())), 1
