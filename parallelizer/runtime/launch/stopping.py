"""Signals that ask a run to save and stop: SIGTERM, SIGUSR1 (Slurm's warning before it preempts a job), and
the signal by which submitit asks its jobs to be queued again.

A rank reads them by `stop_requests`. The parent of ranks records them by `noted_signals`, and passes them on.
When a whole process group is signalled, a rank gets each signal twice. Signals that arrive close together are
therefore one request.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

TOGETHER = 2.0
"""Seconds after the first signal in which others are part of the same request."""

_LOOK = 0.25
"""Seconds between two looks at the clock once a rank has been asked."""


def stop_signals() -> tuple[int, ...]:
    """The signals that ask to save and stop."""
    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if "SUBMITIT_EXECUTOR" in os.environ:
        name = "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
        with suppress(KeyError):
            numbers.append(signal.Signals[name])
    return tuple(dict.fromkeys(numbers))


class Asked:
    """`signal` is the number of the first signal that asked to stop, 0 while none has."""

    def __init__(self) -> None:
        self.signal = 0

    def __bool__(self) -> bool:
        return self.signal != 0


@contextmanager
def stop_requests() -> Iterator[Asked]:
    """In the main thread of a rank: record the signals that ask it to save and stop, instead of ending at
    once.

    Code inside checks `asked.signal` where it can stop, for example after a step; then it saves and leaves
    the context. A second request ends the process at once with exit status 128 + n, even inside a
    collective. Signals that were ignored stay ignored. In other threads than the main thread, which alone
    can have handlers, no request is recorded.

    Afterwards the previous handlers are restored. After a request, however, signals that would end the
    process are ignored: the process is about to end, and the parent's copy of the request may still arrive.
    On leaving without an exception, a previous handler of the requested signal is called: submitit's
    handler queues the job again and ends rank 0 by SystemExit. Processes that are forked inside have the
    previous handlers.
    """
    global _undo
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # Python runs handlers in the main thread when that comes back from torch, which may take as long as a
    # collective. The interpreter itself writes each signal's number into a pipe at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before: dict[int, Any] = {}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def undo() -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        # The thread sets it as well; this is for reads before the thread has run.
        asked.signal = asked.signal or number

    outer, _undo = _undo, undo
    numbers = [n for n in stop_signals() if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    thread = threading.Thread(target=_count, args=(reader, asked, numbers, wakeup), daemon=True)
    try:
        thread.start()
        for number in numbers:
            before[number] = signal.signal(number, note)
        yield asked
    finally:
        undo()
        _undo = outer
        if asked.signal:
            for number in before:
                if before[number] is signal.SIG_DFL:
                    signal.signal(number, signal.SIG_IGN)
        os.close(writer)
        thread.join()
        os.close(reader)
    handler = before.get(asked.signal)
    if callable(handler):
        handler(asked.signal, None)


def _count(reader: int, asked: Asked, numbers: list[int], wakeup: int) -> None:
    """Read the numbers of signals until the pipe is closed, and end the process at a second request.

    It counts the seconds in which it has run. While the main thread keeps the interpreter's lock, it learns of
    signals late, and those of one request may then seem to be far apart.
    """
    since, last = -1.0, time.monotonic()
    while True:
        ready, _, _ = select.select([reader], [], [], None if since < 0 else _LOOK)
        now = time.monotonic()
        if since >= 0:
            since += min(now - last, 2 * _LOOK)
        last = now
        read = os.read(reader, 64) if ready else b""
        if ready and not read:
            return
        if read and wakeup != -1:  # another listener had it: give it back
            with suppress(OSError):
                os.write(wakeup, read)
        for number in read:
            if number in numbers:
                if since > TOGETHER:
                    os._exit(128 + number)
                since = max(since, 0.0)
                asked.signal = asked.signal or number


_undo: Callable[[], None] | None = None


_masks = threading.local()


def _before_fork() -> None:
    if _undo is not None:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())


def _in_parent() -> None:
    if (mask := _masks.__dict__.pop("before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    # Else it would swallow the SIGTERM that is to end it, and tell it to its parent through the pipe. What is
    # sent to it meanwhile waits.
    if _undo is not None:
        _undo()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


class Signals:
    """What a parent of ranks was sent: `numbers`, in order. `stop` is the first that asks the ranks to save and stop, 0
    while none has; `at_once` says that everything must end now.
    """

    def __init__(self, graceful: bool) -> None:
        self.numbers: list[int] = []
        self.stop = 0
        self.at_once = False
        self._graceful = stop_signals() if graceful else ()
        self._when = 0.0

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler. The third Ctrl-C raises the exception at once."""
        self.numbers.append(number)
        if number not in self._graceful:
            self.at_once = True
        elif not self.stop:
            self._when, self.stop = time.monotonic(), number
        elif time.monotonic() - self._when > TOGETHER:
            self.at_once = True
        if self.numbers.count(signal.SIGINT) > 2:
            raise KeyboardInterrupt


@contextmanager
def noted_signals(graceful: bool) -> Iterator[Signals]:
    """Note the signals that ask this process to end, instead of raising wherever the main thread stands.

    The watcher acts on them. In a thread other than the main one nothing is noted. Leaving it without an
    exception calls submitit's handler, as `stop_requests` does.
    """
    got = Signals(graceful)
    wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *(stop_signals() if graceful else ())}
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in wanted:
            # A handler that C code set is None here, and could not be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, got.note)
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    handler = before.get(got.stop)
    if callable(handler):
        handler(got.stop, None)
