"""Functions that run in a forked child of this process, whose results come back pickled.

Whatever would leave something behind in a process runs in a child: a step on a fake world, a model that is watched, an
attempt that may never end. A child has one torch thread, however many its parent has: OpenMP's threads do not live on
in a forked process, which would wait for them forever.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

from parallelizer.diagnostics.diagnostic import PlanError

T = TypeVar("T")


class WorldError(RuntimeError):
    """The child ended without a result; the message holds its traceback."""


Calls = Sequence[tuple[Callable[..., Any], *tuple[Any, ...]]]
"""Functions with their arguments."""


class Children:
    """A forked child for each call, side by side, from now on. As a context it kills on leaving it those whose results
    no caller has taken.
    """

    def __init__(self, calls: Calls) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._children = [_start(function, args) for function, *args in calls]

    def results(self) -> list[Any]:
        """Wait for all, and return what they return, which must pickle.

        PlanError is raised again here with its diagnostics; anything else as WorldError. What they print goes to
        stderr. No child is left, whatever happens.
        """
        children, self._children = self._children, []
        try:
            answers = []
            for _, stream in children:
                with stream:
                    answers.append(stream.read())
        except BaseException:
            _kill(children)
            raise
        statuses = [os.waitpid(pid, 0)[1] for pid, _ in children]
        return [_result(data, status) for data, status in zip(answers, statuses, strict=True)]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: Any) -> None:
        _kill(self._children)
        self._children = []


def _kill(children: Sequence[tuple[int, BinaryIO]]) -> None:
    for pid, stream in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        stream.close()


def in_children(calls: Calls) -> list[Any]:
    """Run each call in a child of its own, side by side, and return what they return: see `Children.results`."""
    return Children(calls).results()


def _start(function: Callable[..., Any], args: list[Any]) -> tuple[int, BinaryIO]:
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _child(send, function, args)
    os.close(send)
    return pid, os.fdopen(receive, "rb")


def _result(data: bytes, status: int) -> Any:
    code = os.waitstatus_to_exitcode(status)
    if not data or code < 0:
        raise WorldError(f"the process that it ran in {_ending(code)}, without a result")
    kind, value = pickle.loads(data)
    if kind == "diagnostics":
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


def _child(send: int, function: Callable[..., Any], args: list[Any]) -> None:
    """Runs in the child and never returns: no exit handler of the parent runs twice."""
    status = 1
    try:
        _use_one_thread()
        gc.freeze()  # what the parent has made outlives the child: it is never collected, and its pages stay shared
        # What a model prints must not stand in a document on stdout.
        sys.stdout = sys.stderr
        with contextlib.suppress(OSError):  # no stderr
            os.dup2(2, 1)
        answer, status = _answer(function, args)
        with os.fdopen(send, "wb") as stream:
            stream.write(answer)
        sys.stderr.flush()
    finally:
        os._exit(status)


def _use_one_thread() -> None:
    """Let torch compute without OpenMP's threads, which only the parent has. A torch that is imported later starts its own."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _answer(function: Callable[..., Any], args: list[Any]) -> tuple[bytes, int]:
    """What is sent to the parent, and the status to end with."""
    try:
        return pickle.dumps(("result", function(*args))), 0
    except PlanError as error:
        return pickle.dumps(("diagnostics", error.diagnostics)), 0
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc())), 1


class NotInTime(Exception):
    """The child was ended, and all processes of its session."""


class Failed(Exception):
    """The child raised, or was killed; the text says how, in one line."""


def in_time(function: Callable[[], T], seconds: float) -> T:
    """What `function` returns, computed in a forked child that leads a session of its own and writes nowhere.

    The result must pickle. No process of that session is left. Raises NotInTime and Failed.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        _run(function, send)
    os.close(send)
    until, data, ended = time.monotonic() + seconds, b"", False
    with os.fdopen(receive, "rb", buffering=0) as stream:
        while not ended and (left := until - time.monotonic()) > 0:
            if select.select([stream], [], [], left)[0]:
                part = stream.read(65536)
                ended = not part
                data += part or b""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not ended:
        raise NotInTime(f"not done after {seconds:g} s")
    if not data:
        raise Failed(f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    error, result = pickle.loads(data)
    if error is not None:
        raise Failed(error)
    value: T = result
    return value


def _run(function: Callable[[], object], send: int) -> None:
    answer: tuple[str | None, object] = "no result", None
    try:
        _use_one_thread()
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
        try:
            answer = None, function()
        except BaseException as error:
            # LaunchError and PlanError are of several lines; the first says what happened.
            text = str(error).strip() or type(error).__name__
            answer = f"{type(error).__name__}: {text.splitlines()[0]}", None
        with os.fdopen(send, "wb") as stream:
            stream.write(pickle.dumps(answer))
    finally:
        os._exit(0)
