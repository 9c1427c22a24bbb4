"""Real ranks for tests: forked gloo processes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from parallelizer.runtime.launch import launcher as launch

T = TypeVar("T")


def run_ranks(worker: Callable[..., T], ranks: int, *args: Any, timeout: float = 60.0) -> list[T]:
    """Run `worker(*args)` on that many ranks and return the results in order of rank; they must pickle.

    The worker may be a closure. A failing assertion in a rank fails the test, with the rank's own traceback.
    `timeout`, in seconds, is for the start and for any one collective.
    """
    return launch.start(
        worker, args, ranks=ranks, device="cpu", start_timeout=timeout, collective_timeout=timeout
    )
