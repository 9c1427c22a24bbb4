"""A lock on a folder of checkpoints: two runs would remove each other's checkpoints, and mix their steps."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span

NAME = "lock"


def hold(folder: Path) -> IO[str] | None:
    """Take a folder until the file that is returned is closed, or the process ends, however it does.

    None where the folder cannot be made, or its file system knows no locks: nothing is held then. Raises PlanError
    `checkpoint-in-use`, which names the process that holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / NAME, "a+")  # noqa: SIM115 - open as long as it is held
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        message = f"another run saves into this folder: {file.read().strip() or 'a process that does not say which'}"
        file.close()
        help_text = "wait for it to end, or stop it; for a second run, choose another hydra.run.dir or train.checkpoint_dir"
        raise PlanError([Diagnostic("checkpoint-in-use", message, Span(str(folder)), help_text)]) from None
    except OSError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
