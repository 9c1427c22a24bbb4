"""Ends that are not errors: Ctrl-C while a command imports its modules, and a closed pipe.

Of Ctrl-C: no command's own handling is in place yet then, and code that is being imported may turn the exception
into another. Imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

READER_GONE = 128 + 13
"""The exit status of a process that writes into a closed pipe, as a shell reports SIGPIPE."""


def end_at_once() -> None:
    """Until `raise_again`: Ctrl-C ends the process with exit status 130.

    Does nothing if other code handles the signal, or if it is ignored.
    """
    if _is_ours_to_set(signal.default_int_handler):
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Ctrl-C raises KeyboardInterrupt, as it does in Python."""
    if _is_ours_to_set(_end):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def reader_gone() -> int:
    """After BrokenPipeError (`| head`): the reader has gone, so the remaining output is discarded.

    Returns the exit status.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return READER_GONE


def _is_ours_to_set(present: object) -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is present


def _end(number: int, frame: object) -> None:
    os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(130)
