"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import settings

from tests import left_out

# A shell ignores Ctrl-C in what it starts in the background, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tables are as wide as what they are written to; a runner that starts workers may have set a width for them.
os.environ.pop("COLUMNS", None)

# What an example does is bounded by its test; how long it takes is up to the machine, which is shared.
# Examples are the same in every run; `make test-all` draws others each time.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("drawn", deadline=None)
settings.load_profile("same")

gc.disable()  # until all is collected: modules and tests are no garbage


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import torch where tests run: pytest-xdist's first process only deals them out."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return
    import torch
    import torch._dynamo  # which every rank would import after its fork: half a second each, spent once here

    # Tests fork ranks, and a process that forks must not have run OpenMP threads: before the first operation.
    torch.set_num_threads(1)


OF_PARTS = tuple(
    f"tests/{room}/" for room in ("hugging_face", "proof", "runtime", "simulate", "styles", "training")
)
"""Folders that have about half of the tests that start ranks, by time."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """How pytest-xdist deals tests to its processes, under `--dist loadgroup`.

    Tests that start ranks stay together, one after another in two processes: more at once would starve each other
    of cores until a collective runs out of time. The tests of a file share its fixtures, so they stay together too.
    """
    left_out.mark(items)
    for item in items:
        group = item.nodeid.partition("::")[0]
        if item.get_closest_marker("ranks"):
            group = "ranks of parts" if group.startswith(OF_PARTS) else "ranks of commands"
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: nobody looks for garbage in it, here or in a fork."""
    gc.freeze()
    gc.enable()
