"""Functions in new processes, for a process that has used CUDA and cannot fork.

A new process imports what it needs, among it the script of this one, as those of `multiprocessing`'s start method spawn
do. It sees no GPU unless it is told so. It has this process's default random state and default dtype.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from parallelizer.child import cuda_use
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError

CODE = "cuda-in-use"
BEFORE = "call this before the process uses CUDA"
DIAGNOSTICS = "diagnostics"
"""The kind of an answer that is diagnostics."""

_prepare: list[Callable[[], None]] = []

_REACHED = b"reached"
"""What a new process sends first."""


@dataclass(frozen=True)
class PickledCall:
    """A pickled call in a file, since what a pipe takes at once is less than a model."""

    path: Path

    def loaded(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The function and its arguments, with the state that they were called in. Raises PlanError."""
        try:
            function, args, prepare, state = pickle.loads(self.path.read_bytes())
            for each in prepare:
                each()
        except Exception as error:  # whatever the import of a user's module raises
            raise PlanError([not_sent("what it needs", error)]) from error
        if state is not None:
            import torch

            torch.set_default_dtype(state[0])
            torch.set_rng_state(state[1])
        return function, args


Target = Callable[[int, PickledCall], None]
"""What runs in a new process: it writes its answer to the file descriptor and ends the process."""


class NewProcess:
    """A process that computes one result."""

    def __init__(self, process: SpawnProcess, receive: Connection, call: Path) -> None:
        self._process, self._receive, self._call = process, receive, call

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    def fileno(self) -> int:
        """The file descriptor of what it sends, for `select`."""
        return self._receive.fileno()

    def read(self) -> bytes:
        """Everything that it sends, to its end."""
        with os.fdopen(os.dup(self.fileno()), "rb") as stream:
            return self.answer(stream.read())

    def answer(self, sent: bytes) -> bytes:
        """What it has sent, if it was all, as an answer."""
        if sent.startswith(_REACHED):
            return sent.removeprefix(_REACHED)
        self._process.join()
        if (self._process.exitcode or 0) < 0:
            return b""
        return pickle.dumps((DIAGNOSTICS, (_script_failed(),)))

    def wait(self) -> int:
        """Wait until it has ended. Returns its exit code, negative for a signal."""
        self._process.join()
        code = self._process.exitcode or 0
        self._close()
        return code

    def kill(self) -> int:
        """End it, and close what belongs to it. Returns its exit code."""
        self._process.kill()
        return self.wait()

    def _close(self) -> None:
        self._process.close()
        self._receive.close()
        self._call.unlink(missing_ok=True)


def start(
    target: Target, function: Callable[..., Any], args: Sequence[Any], *, sees_gpus: bool = False
) -> NewProcess:
    """Start `target` in a new process with a call of `function`. Raises PlanError where this does not pickle."""
    data = pickled(
        (function, args, preparations(), _state()), getattr(function, "__qualname__", str(function))
    )
    number, name = tempfile.mkstemp(prefix="parallelizer-")
    with os.fdopen(number, "wb") as stream:
        stream.write(data)
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_reach, args=(target, send, PickledCall(Path(name))))
    try:
        with send, nullcontext() if sees_gpus else cuda_use.gpus_hidden():
            process.start()
    except BaseException:
        receive.close()
        os.unlink(name)
        raise
    return NewProcess(process, receive, Path(name))


def prepare_by(function: Callable[[], None]) -> None:
    """From now on call a function of a module, too, in new processes and ranks that this process starts: it makes known there
    what models need and do not carry with them when they are pickled.
    """
    if function not in _prepare:
        _prepare.append(function)


def preparations() -> tuple[Callable[[], None], ...]:
    """What to call in a new process first."""
    return tuple(_prepare)


def _reach(target: Target, send: Connection, call: PickledCall) -> None:
    descriptor = os.dup(send.fileno())
    send.close()
    os.write(descriptor, _REACHED)
    target(descriptor, call)


def _state() -> tuple[Any, Any] | None:
    """What a forked process would have too: torch's default dtype, and the state of its random numbers."""
    torch = sys.modules.get("torch")
    return None if torch is None else (torch.get_default_dtype(), torch.get_rng_state())


def pickled(value: object, what: str) -> bytes:
    """The value as bytes. Raises PlanError where it does not pickle; `what` names it."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever an object's own reduction raises
        raise PlanError([not_sent(what, error)]) from error


def not_sent(what: str, error: Exception) -> Diagnostic:
    """What to say of a call that cannot be sent to a new process."""
    lines = str(error).strip().splitlines()
    return Diagnostic(
        CODE,
        "this process has used CUDA, so that it cannot fork, and a new process cannot be given "
        f"{what}: {type(error).__name__}{': ' + lines[0] if lines else ''}",
        None,
        f"{BEFORE}, or define classes and functions at the top level of a module that can be imported",
    )


def _script_failed() -> Diagnostic:
    script = getattr(sys.modules["__main__"], "__file__", None)
    with contextlib.suppress(ValueError):  # another drive
        script = script and os.path.relpath(script)
    return Diagnostic(
        CODE,
        "this process has used CUDA, so that it cannot fork, and a new process ended with an error as it imported "
        f"{script or 'its modules'}",
        None,
        f'{BEFORE}, or put what the script does under `if __name__ == "__main__":`, since new processes import it',
    )
