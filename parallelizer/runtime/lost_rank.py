"""Exceptions that only say that another rank has ended."""

from __future__ import annotations

import re
from collections.abc import Iterator

_GONE = re.compile(
    r"connection (was likely )?closed( by peer)?|connection reset( by peer)?|broken pipe|remote process exited|ncclRemoteError"
    r"|communicator was aborted",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's stores say when the other end of a connection has ended."""


def is_of_another(error: BaseException) -> bool:
    """Whether an exception says that another rank has ended. (One that is late may be stuck, and is something else.)"""
    return what_was_said(error) is not None


def what_was_said(error: BaseException) -> str | None:
    """`Connection closed by peer`; None where it is something else."""
    for each in _causes(error):
        found = _GONE.search(str(each)) if isinstance(each, RuntimeError | OSError) else None
        if found is not None:
            return found[0]
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
