"""A function in a child process that is given so many seconds, with whatever it started."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
