"""A function that runs in a child of this process, for so many seconds at most."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from parallelizer.child import cuda_use, new_process
from parallelizer.child.children import use_one_thread
from parallelizer.diagnostics.diagnostic import PlanError

T = TypeVar("T")


class NotInTime(Exception):
    """The child was ended, and all processes of its session."""


class Failed(Exception):
    """The child raised, or was killed; the text says how, in one line."""


def in_time(function: Callable[[], T], seconds: float, *, sees_gpus: bool = False) -> T:
    """What `function` returns, computed in a child that leads a session of its own and writes nowhere.

    The result must pickle. No process of that session is left. Raises NotInTime and Failed, and PlanError where
    a new process is needed and the function does not pickle.
    """
    run = _new_in_time if cuda_use.must_not_fork() else _forked_in_time
    value: T = _in_time_result(*run(function, seconds, sees_gpus=sees_gpus), seconds)
    return value


def _forked_in_time(
    function: Callable[[], object], seconds: float, *, sees_gpus: bool
) -> tuple[bytes | None, int]:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        if not sees_gpus:
            cuda_use.hide_gpus()
        _run(send, lambda: function)
    os.close(send)
    with os.fdopen(receive, "rb", buffering=0) as stream:
        data = _sent(stream.fileno(), seconds)
    _end_session(child)
    return data, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _new_in_time(
    function: Callable[[], object], seconds: float, *, sees_gpus: bool
) -> tuple[bytes | None, int]:
    child = new_process.start(_run_new, function, (), sees_gpus=sees_gpus)
    try:
        data = _sent(child.fileno(), seconds)
        if data is not None:
            data = child.answer(data)
        _end_session(child.pid)
    finally:
        code = child.kill()
    return data, code


def _sent(descriptor: int, seconds: float) -> bytes | None:
    """What comes through a pipe to its end, or None where its end does not come in time."""
    until, data = time.monotonic() + seconds, b""
    while (left := until - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            part = os.read(descriptor, 65536)
            if not part:
                return data
            data += part
    return None


def _end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _in_time_result(data: bytes | None, code: int, seconds: float) -> Any:
    if data is None:
        raise NotInTime(f"not done after {seconds:g} s")
    if not data:
        raise Failed(f"the process ended with status {code}")
    error, result = pickle.loads(data)
    if error == new_process.DIAGNOSTICS:
        raise PlanError(result)
    if error is not None:
        raise Failed(error)
    return result


def _run_new(send: int, call: new_process.PickledCall) -> None:
    _run(send, lambda: _loaded(call))


def _loaded(call: new_process.PickledCall) -> Callable[[], object]:
    function, _ = call.loaded()
    use_one_thread()  # torch may be imported only now
    return function


def _run(send: int, function: Callable[[], Callable[[], object]]) -> None:
    """Runs in the child, which never returns: calls what `function` hands out."""
    answer: tuple[str | None, object] = "no result", None
    try:
        use_one_thread()
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
        try:
            answer = None, function()()
        except BaseException as error:
            # LaunchError and PlanError are of several lines; the first says what happened.
            text = str(error).strip() or type(error).__name__
            answer = f"{type(error).__name__}: {text.splitlines()[0]}", None
        with os.fdopen(send, "wb") as stream:
            stream.write(pickle.dumps(answer))
    finally:
        os._exit(0)
