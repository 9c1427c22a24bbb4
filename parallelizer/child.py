"""A fake world: one process that believes to be a rank among any number, in a child of its own.

A process that has used a fake process group, even once, may not fork ranks afterwards: group names stay
behind. So everything on the fake world runs in a forked child and comes back as plain data.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from parallelizer.diagnostics import PlanError


class WorldError(RuntimeError):
    """The child ended without a result; the message holds its traceback."""


Calls = Sequence[tuple[Callable[..., Any], *tuple[Any, ...]]]
"""Functions with their arguments."""


class Children:
    """A forked child for each call, side by side, from now on. As a context it kills on leaving it those whose results
    nobody has taken.
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
    gc.freeze()  # what the parent has made outlives the child: nobody looks for garbage in it, or copies it
    try:
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


def _answer(function: Callable[..., Any], args: list[Any]) -> tuple[bytes, int]:
    """What is sent to the parent, and the status to end with."""
    try:
        return pickle.dumps(("result", function(*args))), 0
    except PlanError as error:
        return pickle.dumps(("diagnostics", error.diagnostics)), 0
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc())), 1


def enter_fake_world(world_size: int, rank: int) -> None:
    """Make this process rank `rank` of `world_size` ranks that do not exist. Only in a child."""
    import torch.distributed as dist

    from parallelizer import torch_private

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=torch_private.fake_store())
