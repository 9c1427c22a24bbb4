"""Ctrl-C while a command imports what it needs: it ends at once, with a word and without a traceback.

No command's own handling is in place yet then, and code that is being imported may turn the exception into
another. Imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import threading


def end_at_once() -> None:
    """Until `raise_again`: Ctrl-C ends the process with exit status 130.

    Does nothing where somebody else handles the signal, or where it is ignored.
    """
    if _is_ours_to_set(signal.default_int_handler):
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Ctrl-C raises KeyboardInterrupt, as it does in Python."""
    if _is_ours_to_set(_end):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_ours_to_set(present: object) -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is present


def _end(number: int, frame: object) -> None:
    os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(130)
